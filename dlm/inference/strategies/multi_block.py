"""Strategy `multi_block`: a few consecutive blocks are denoised together (D2F, d3LLM, Fast-dLLM v2's pipelines)."""

from typing import TYPE_CHECKING

from dlm.inference.strategies.block import Block

if TYPE_CHECKING:
    from dlm.inference.sequence import Sequence


class MultiBlock(Block):
    """Opens the next block once `block_add` of the last open one is decided, up to `max_active_blocks`.

    The decode rule sees the masks of all open blocks; the first one always gets its best.
    """

    def most_open(self, seq: "Sequence") -> int:
        return seq.decoding.settings.max_active_blocks

    def may_open(self, seq: "Sequence") -> bool:
        blocks = seq.canvas.open
        if not blocks or len(blocks) >= self.most_open(seq):
            return not blocks
        decided = 1 - seq.canvas.masked[blocks[-1].positions].mean()
        return decided >= seq.decoding.settings.block_add and not any(self.ends(seq, block) for block in blocks)
