"""Strategy `infilling`: holes in a given text, all together or `block_length` positions at a time."""

from typing import TYPE_CHECKING

from dlm.inference.canvas import OpenBlock
from dlm.inference.strategies.multi_block import MultiBlock

if TYPE_CHECKING:
    from dlm.inference.sequence import Sequence


class Infilling(MultiBlock):
    """Blocks are of holes, so text stands on both sides of them, and end-of-text ends nothing.

    With `strategy = "multi_block"` several of them are open at a time.
    """

    left_to_right = False

    def most_open(self, seq: "Sequence") -> int:
        return super().most_open(seq) if seq.decoding.settings.strategy == "multi_block" else 1

    def ends(self, seq: "Sequence", block: OpenBlock) -> bool:
        return False
