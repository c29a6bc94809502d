"""What a drafter is: the part of speculative decoding that guesses. It never decides: the target does."""

from collections.abc import Sequence as Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from dlm.diffusion.speculate import Drawn

if TYPE_CHECKING:
    from dlm.inference.forward import Forward
    from dlm.inference.scheduler import Scheduled
    from dlm.inference.sequence import Sequence


@dataclass(frozen=True)
class Wish:
    """A request that wants tokens guessed."""

    sequence: "Sequence"
    anchor: int
    """Position of its newest token."""
    count: int
    """How many tokens after it: at least 1, at most what `ready` said."""
    rows: int
    """Positions of the block, the anchor's included: count + 1, or one more at the end of the text, whose last token is the
    target's own. A draft that fills all of a block at once goes by that, as z-lab's loop does."""


@dataclass(frozen=True)
class Guess:
    """Tokens for the positions after the anchor, as many as were wished for or fewer."""

    tokens: np.ndarray
    drawn: Drawn | None = None
    """What they were drawn from, for requests that verify by `reject`; None there: each was certain."""
    forwards: int = 0
    """Forwards of a network that they cost."""
    there: Tensor | None = None
    """The tokens where a device holds them and the host does not: of `tokens` then only the length is read."""


class Drafter(Protocol):
    """Guesses tokens for all requests of an engine that want it.

    What a request's text will be does not depend on it (`verify = "match"`), or only which of the target's random texts
    it is ("reject"). `ready` is asked after each step, `propose` before the target's forward, `absorb` after it.
    """

    name: str
    most: int
    """Tokens it guesses at a time, at most."""
    taps: tuple[int, ...]
    """Layers of the target whose outputs it reads in `absorb`."""
    marks: str
    """Sets pages apart that hold something of this drafter beside the target's keys; "" where they hold nothing."""

    def ready(self, seq: "Sequence", anchor: int, most: int) -> int:
        """How many tokens it will guess after the anchor in the next step, at most `most`."""
        ...

    def propose(self, wishes: Sized[Wish]) -> list[Guess]:
        """A guess for each, in one computation for all."""
        ...

    def absorb(self, scheduled: "Sized[Scheduled]", forward: "Forward") -> None:
        """The target has run: `forward.taps` are its layers' outputs for the rows of these requests, and others."""
        ...

    def park(self, seq: "Sequence") -> Any:
        """What to keep, in the host's memory, of a request that gives up its pages."""
        ...

    def resume(self, seq: "Sequence", parked: Any) -> None:
        """Take up what `park` gave."""
        ...

    def forget(self, seq: "Sequence") -> None:
        """A request has ended."""
        ...

    def reload(self) -> None:
        """The target's weights have changed."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Plain:
    """A drafter that keeps nothing: what most derive from."""

    name = "draft"
    most = 1
    taps: tuple[int, ...] = ()
    marks = ""

    def ready(self, seq: "Sequence", anchor: int, most: int) -> int:
        return min(self.most, most)

    def propose(self, wishes: Sized[Wish]) -> list[Guess]:
        raise NotImplementedError(f"{type(self).__name__} must guess")

    def absorb(self, scheduled: "Sized[Scheduled]", forward: "Forward") -> None:
        pass

    def park(self, seq: "Sequence") -> Any:
        return None

    def resume(self, seq: "Sequence", parked: Any) -> None:
        pass

    def forget(self, seq: "Sequence") -> None:
        pass

    def reload(self) -> None:
        pass

    def close(self) -> None:
        pass
