"""What a step runs of a request: which positions are asked, which keys they see, which are written. One row a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlm.inference.sequence import Sequence as Sequence_


@dataclass(frozen=True)
class Span:
    """Query positions of one request. Their keys are written to its pages first; then they look at 0 … visible - 1."""

    positions: Sequence[int]
    """In ascending order; a range wherever it can be."""
    visible: int
    silent: int = 0
    """Positions under this one are asked, but what their pages hold stays as it is."""
    unwritten: frozenset[int] = frozenset()
    """So are these."""
    decides: bool = True
    """False for a part of a prompt that only fills pages."""

    @property
    def end(self) -> int:
        return self.positions[-1] + 1


def full(seq: "Sequence_") -> Span:
    """The whole canvas: no cache at all, and the refresh of every approximation."""
    return Span(range(seq.length), seq.length)


def prefix(seq: "Sequence_") -> Span:
    """Fast-dLLM's prefix cache: the active block and all after it; what stands before it is as it was at its start."""
    if seq.stale:
        return full(seq)
    start = min(seq.lingering_from, seq.first)
    return Span(range(max(0, start - seq.shift), seq.length), seq.length, silent=start)


def dual(seq: "Sequence_") -> Span:
    """Fast-dLLM's dual cache: the active block alone; everything else is as it was at its start."""
    if seq.stale:
        return full(seq)
    if not seq.request.holes:
        start = min(seq.lingering_from, seq.first)
        return Span(range(max(0, start - seq.shift), seq.last), seq.length, silent=start)
    own = set(seq.active)
    before = {max(0, position - seq.shift) for position in own} - own
    return Span(tuple(sorted(own | before)), seq.length, unwritten=frozenset(before))


def exact(seq: "Sequence_") -> Span:
    """All whose keys are not final yet, up to the active block's end: nothing after it is seen by anyone.

    A finished block's final keys are so computed in the next block's first step: there is no forward to save them.
    """
    sight = seq.sight
    assert sight is not None, "bidirectional attention has no exact cache"
    end = min(-(-seq.last // sight) * sight, seq.length)
    if sight == 1 and seq.shift:
        end = max(1, seq.last - 1)  # the token at p is read at p - 1
    start = min(seq.clean, max(0, seq.first - seq.shift), end - 1)
    return Span(range(start, end), end, silent=seq.clean)


CACHES: dict[str, Callable[["Sequence_"], Span]] = {"none": full, "prefix": prefix, "dual": dual, "exact": exact}
