"""Caches: which positions of a request a step runs, which keys these see, and which are written. One function a cache."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dlm.errors import UserError

if TYPE_CHECKING:
    from dlm.inference.sequence import Sequence as Sequence_
    from dlm.models.config import ModelConfig


class Span(NamedTuple):
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
    return Span(range(seq.canvas.length), seq.canvas.length)


def prefix(seq: "Sequence_") -> Span:
    """Fast-dLLM's prefix cache: the active block and all after it; what stands before it is as it was at its start."""
    if seq.stale:
        return full(seq)
    start = min(seq.lingering_from, seq.canvas.first)
    return Span(range(max(0, start - seq.shift), seq.canvas.length), seq.canvas.length, silent=start)


def dual(seq: "Sequence_") -> Span:
    """Fast-dLLM's dual cache: the active block alone; everything else is as it was at its start."""
    if seq.stale:
        return full(seq)
    if not seq.request.holes:
        start = min(seq.lingering_from, seq.canvas.first)
        return Span(range(max(0, start - seq.shift), seq.canvas.last), seq.canvas.length, silent=start)
    own = set(seq.canvas.active)
    before = {max(0, position - seq.shift) for position in own} - own
    return Span(tuple(sorted(own | before)), seq.canvas.length, unwritten=frozenset(before))


def exact(seq: "Sequence_") -> Span:
    """All whose keys are not final yet, up to the active block's end: nothing after it is seen by anyone.

    A finished block's final keys are so computed in the next block's first step: there is no forward to save them.
    """
    block = seq.attention_block
    assert block is not None, "bidirectional attention has no exact cache"
    end = min(-(-seq.canvas.last // block) * block, seq.canvas.length)
    if block == 1 and seq.shift:
        end = max(1, seq.canvas.last - 1)  # the token at p is read at p - 1
    start = min(seq.pages.clean, max(0, seq.canvas.first - seq.shift), end - 1)
    return Span(range(start, end), end, silent=seq.pages.clean)


CACHES: dict[str, Callable[["Sequence_"], Span]] = {"none": full, "prefix": prefix, "dual": dual, "exact": exact}


def cache_of(model: "ModelConfig", cache: str) -> str:
    """The cache that `cache` means for this family, or an error that says which would do."""
    family, kind = model.model_type, model.attention
    if kind == "bidirectional":
        if cache == "exact":
            raise UserError(
                f'cache = "exact" needs causal or block-causal attention, and {family} is bidirectional, where every '
                'token changes all keys: use "dual" or "prefix", which approximate, or "none"'
            )
        return "none" if cache == "auto" else cache
    if cache == "dual":
        raise UserError(
            f'cache = "dual" is for bidirectional families: {family} is {kind}, so nothing after the active block is '
            'seen: use "exact" (or "auto"), which changes no token'
        )
    return "none" if cache == "none" else "exact"
