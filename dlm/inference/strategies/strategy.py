"""What a decoding strategy is: the part of a step that differs between them."""

from collections.abc import Mapping
from collections.abc import Sequence as Sized
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from dlm.diffusion.choose import Address
from dlm.inference.canvas import Decision

if TYPE_CHECKING:
    from dlm.inference.forward import Forward
    from dlm.inference.pages import PagePool
    from dlm.inference.request import Generation
    from dlm.inference.scheduler import Scheduled
    from dlm.inference.sequence import Sequence
    from dlm.models.lm import LM


class Strategy(Protocol):
    """How requests are denoised: which blocks are open, which answers are asked for, what becomes of them.

    An engine makes one object of each strategy that its requests name. It serves all of them, so that what it computes
    beside the network's forward (a draft, say) is computed for all at once. What it must remember of one request is
    `seq.memory`. Most strategies derive from `Block` and change one or two methods.

    Sources: the table of strategies in Fast-dLLM (arXiv 2505.22618), D2F (2508.09192) and d3LLM is a choice of `begin`
    and `advance`; speculative decoding also needs `prepare`, `resolve`, `observe`, `park` and `resume`.
    """

    taps: tuple[int, ...]
    """Layers whose outputs `observe` reads, of all rows, in `forward.taps`; () for none."""
    marks: str
    """Sets pages apart that hold something of the strategy beside keys, so that only its own requests share them."""
    left_to_right: bool
    """Whether all positions before the open blocks are final: then text is given out as it settles."""

    def __init__(self, lm: "LM", pool: "PagePool") -> None:
        """For an engine with this model and this pool."""
        ...

    def begin(self, seq: "Sequence") -> bool:
        """Open a new request's first blocks; False if it has none. Called once, before the request is queued."""
        ...

    def branches(self, seq: "Sequence") -> int:
        """Rows that a position has in a forward, each with keys of its own: states that are run side by side."""
        ...

    def forwards(self, seq: "Sequence") -> int:
        """Forwards that a step counts as."""
        ...

    def shown(self, seq: "Sequence", branch: int) -> np.ndarray:
        """The tokens that the network is shown in a branch, (capacity,)."""
        ...

    def views(self, seq: "Sequence") -> "list[Sequence]":
        """States of the request that this step decides about, each in a branch: itself first."""
        ...

    def settle(self, seq: "Sequence", decisions: list[Decision]) -> list[Decision]:
        """Of the decisions about `views`, those that are taken, one step after the other; at least the first."""
        ...

    def most_open(self, seq: "Sequence") -> int:
        """How many blocks of the request are open at a time, at most."""
        ...

    def asks(self, seq: "Sequence") -> np.ndarray:
        """Which columns the network is asked about in this step, (w,) bool."""
        ...

    def luck(self, seq: "Sequence", positions: np.ndarray) -> np.ndarray:
        """Of each position, the step that is part of its random numbers' address."""
        ...

    def reach(self, seq: "Sequence") -> int:
        """How many positions the next step needs pages for, beside those that the network sees."""
        ...

    def prepare(self, scheduled: "Sized[Scheduled]") -> None:
        """What a step computes before the network's forward, for those requests of this strategy that take part."""
        ...

    def late(self, seq: "Sequence") -> Tensor | None:
        """Tokens from the first open position on that a device holds and the host does not know yet, (n,); mostly None.

        The step shows them to the network in place of the canvas's, and gives them to `learn` with the network's answers.
        """
        ...

    def learn(self, seq: "Sequence", tokens: np.ndarray) -> None:
        """What `late` promised."""
        ...

    def observe(self, scheduled: "Sized[Scheduled]", forward: "Forward") -> None:
        """What a step computes after the network's forward, before its answers are decided upon."""
        ...

    def judges(self, seq: "Sequence") -> bool:
        """Whether tokens are chosen by `judge`."""
        ...

    def judging(self, seqs: "Sized[Sequence]") -> dict[str, np.ndarray]:
        """Arrays that `judge` will read on the device."""
        ...

    def judge(
        self, seqs: "Sized[Sequence]", p: Tensor, token: Tensor, address: Address, x: Mapping[str, Tensor]
    ) -> Tensor:
        """Other tokens, (n,), than those that were drawn from p, (n, v), for the columns that these requests asked about.

        `x` has the arrays of `judging`, as tensors.
        """
        ...

    def resolve(self, seq: "Sequence", proposed: Decision) -> Decision:
        """What becomes of the network's answers, where the decode rule proposes this."""
        ...

    def advance(self, seq: "Sequence", decision: Decision) -> bool:
        """Close finished blocks and open new ones, after `decision` was written down; False at the request's end."""
        ...

    def finished(self, seq: "Sequence", result: "Generation") -> "Generation":
        """The result with what only the strategy knows of it."""
        ...

    def park(self, seq: "Sequence") -> Any:
        """What to keep, in the host's memory, of a request that gives up its pages. They still hold its keys now."""
        ...

    def resume(self, seq: "Sequence", parked: Any) -> None:
        """Take up what `park` gave. The request's keys lie on other pages now."""
        ...

    def forget(self, seq: "Sequence") -> None:
        """A request has ended, whatever way."""
        ...
