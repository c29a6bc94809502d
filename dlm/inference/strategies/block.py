"""Strategy `block`: one block after the other, in the order of the plan (LLaDA's semi-autoregressive sampling)."""

from collections.abc import Mapping
from collections.abc import Sequence as Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from dlm.diffusion.choose import Address
from dlm.inference.canvas import Decision, OpenBlock

if TYPE_CHECKING:
    from dlm.inference.forward import Forward
    from dlm.inference.pages import PagePool
    from dlm.inference.request import Generation
    from dlm.inference.scheduler import Scheduled
    from dlm.inference.sequence import Sequence
    from dlm.models.lm import LM


class Block:
    """Opens a block when the one before is finished; ends with the block that holds an end-of-text token."""

    taps: tuple[int, ...] = ()
    marks = ""
    left_to_right = True

    def __init__(self, lm: "LM", pool: "PagePool") -> None:
        self.lm, self.pool = lm, pool

    def begin(self, seq: "Sequence") -> bool:
        seq.blocks = seq.decoding.plan.blocks(seq.request)
        return self._open_more(seq)

    def branches(self, seq: "Sequence") -> int:
        return 2 if seq.decoding.settings.cfg_scale > 0 else 1

    def forwards(self, seq: "Sequence") -> int:
        return seq.branches

    def shown(self, seq: "Sequence", branch: int) -> np.ndarray:
        """Under guidance, masks stand for the prompt in the second branch."""
        canvas = seq.canvas
        return np.where(canvas.given, canvas.mask_id, canvas.tokens) if branch else canvas.tokens

    def views(self, seq: "Sequence") -> "list[Sequence]":
        return [seq]

    def settle(self, seq: "Sequence", decisions: list[Decision]) -> list[Decision]:
        return decisions

    def most_open(self, seq: "Sequence") -> int:
        return 1

    def may_open(self, seq: "Sequence") -> bool:
        """Whether one more block may be opened now."""
        return not seq.canvas.open

    def ends(self, seq: "Sequence", block: OpenBlock) -> bool:
        """Whether the request ends with this block."""
        return not seq.decoding.stop.isdisjoint(seq.canvas.tokens[block.where].tolist())

    def asks(self, seq: "Sequence") -> np.ndarray:
        """The masks; everything in open blocks where committed tokens may still change."""
        canvas = seq.canvas
        if seq.revises:
            return canvas.unfinished()
        masks = canvas.open_masks()
        return masks if len(canvas.open) == 1 else masks & canvas.unfinished()

    def luck(self, seq: "Sequence", positions: np.ndarray) -> np.ndarray:
        return np.full(len(positions), seq.step)

    def reach(self, seq: "Sequence") -> int:
        return 0

    def prepare(self, scheduled: "Sized[Scheduled]") -> None:
        pass

    def late(self, seq: "Sequence") -> Tensor | None:
        return None

    def learn(self, seq: "Sequence", tokens: np.ndarray) -> None:
        pass

    def observe(self, scheduled: "Sized[Scheduled]", forward: "Forward") -> None:
        pass

    def judges(self, seq: "Sequence") -> bool:
        return False

    def judging(self, seqs: "Sized[Sequence]") -> dict[str, np.ndarray]:
        return {}

    def judge(
        self, seqs: "Sized[Sequence]", p: Tensor, token: Tensor, address: Address, x: Mapping[str, Tensor]
    ) -> Tensor:
        return token

    def resolve(self, seq: "Sequence", proposed: Decision) -> Decision:
        return proposed

    def advance(self, seq: "Sequence", decision: Decision) -> bool:
        return self.proceed(seq)

    def proceed(self, seq: "Sequence") -> bool:
        """Close finished blocks and open new ones; False at the request's end."""
        while seq.canvas.open and (block := seq.canvas.open[0]).closed:
            seq.close(block)
            if self.ends(seq, block):
                return False
        return self._open_more(seq)

    def finished(self, seq: "Sequence", result: "Generation") -> "Generation":
        return result

    def park(self, seq: "Sequence") -> Any:
        return None

    def resume(self, seq: "Sequence", parked: Any) -> None:
        pass

    def forget(self, seq: "Sequence") -> None:
        pass

    def _open_more(self, seq: "Sequence") -> bool:
        """Open blocks while the strategy lets it; whether any is open."""
        while self.may_open(seq) and (block := next(seq.blocks, None)) is not None:
            seq.open(block)
        return bool(seq.canvas.open)
