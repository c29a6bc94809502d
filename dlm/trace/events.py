"""The kinds of events at a position of a canvas, and the marks that stand in place of a step or a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int32
    from numpy import ndarray

SET, MASK, REPLACE, ACCEPT, REJECT = range(5)
KINDS = ("set", "mask", "replace", "accept", "reject")
"""What an event does: a mask becomes a token, a token becomes a mask again, a token becomes another; a drafted token is
taken (a mask becomes it), or is refused (nothing changes)."""
GIVEN, NEVER = -1, 2**31 - 1
"""In place of a step: the token was given, or the position stays a mask to the end."""
NO_MASK, REDACTED = -1, -2
"""In place of a token: the mask of a family without one, and a redacted token of a prompt."""


class Event(NamedTuple):
    """One change of one position; steps count from 0."""

    step: int
    position: int
    kind: int
    token: int
    confidence: float | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Later:
    """Events after a position's first token, in the order of their steps: edits, remasks, refused drafts."""

    step: Int32[ndarray, " m"]
    position: Int32[ndarray, " m"]
    kind: Int32[ndarray, " m"]
    token: Int32[ndarray, " m"]

    def __len__(self) -> int:
        return len(self.step)

    def __iter__(self) -> Iterator[Int32[ndarray, " m"]]:
        """The four columns."""
        return iter((self.step, self.position, self.kind, self.token))


NOTHING = np.zeros(0, np.int32)
NO_GROWTH = np.zeros((0, 2), np.int32)
NO_EVENTS = Later(step=NOTHING, position=NOTHING, kind=NOTHING, token=NOTHING)
