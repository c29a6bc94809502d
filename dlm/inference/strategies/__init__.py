"""Decoding strategies: how a request's blocks are opened, asked about and finished. One file and one line each."""

from dlm.inference.strategies.block import Block
from dlm.inference.strategies.infilling import Infilling
from dlm.inference.strategies.jumps import Jumps
from dlm.inference.strategies.multi_block import MultiBlock
from dlm.inference.strategies.speculative import Speculative
from dlm.inference.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "block": Block,
    "multi_block": MultiBlock,
    "infilling": Infilling,  # chosen by holes in the prompt
    "speculative": Speculative,  # chosen by a draft
    "jumps": Jumps,  # chosen by draft = "self"
}
