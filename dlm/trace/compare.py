"""Compares two traces step by step: where they differ first, and how much."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlm.fields import flat
from dlm.trace.trace import Trace

ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One position in one state that differs; a token is None where a trace has no such position."""

    step: int
    """The step, from 0, that made the difference; -1 for the start."""
    position: int
    a: int | None
    b: int | None


@dataclass(frozen=True, kw_only=True)
class Diff:
    """How two traces differ."""

    a: Trace = field(repr=False)
    b: Trace = field(repr=False)
    first: Difference | None
    """The first difference: the earliest step, and in it the lowest position."""
    counts: tuple[int, ...]
    """How many positions differ in each state; a trace with fewer steps keeps its last state."""
    facts: dict[str, tuple[Any, Any]]
    """Facts that differ, under dotted names; `ABSENT` where one trace lacks them."""

    @property
    def identical(self) -> bool:
        """Whether they agree in every state and in their number of steps."""
        return self.first is None and self.a.num_steps == self.b.num_steps

    @property
    def shared_states(self) -> int:
        """The number of equal states from the start."""
        return next((k for k, count in enumerate(self.counts) if count), len(self.counts))

    def __str__(self) -> str:
        lines = [f"{key}: {a!r} / {b!r}" for key, (a, b) in self.facts.items()]
        steps = len(self.counts) - 1
        if self.first is None:
            same = f"identical at {steps} of {steps} steps"
            longer = "" if self.identical else f"; {self.a.num_steps} steps / {self.b.num_steps} steps"
            return "\n".join([*lines, same + longer])
        where = "at the start" if self.first.step < 0 else f"at step {self.first.step}"
        tokens = " / ".join(_shown(trace, token) for trace, token in ((self.a, self.first.a), (self.b, self.first.b)))
        lines.append(f"they part {where}, position {self.first.position}: {tokens}")
        same = f"{self.shared_states} of {steps + 1} states are the same"
        return "\n".join([*lines, f"{same}; {self.counts[-1]} positions differ at the end"])


def diff(a: Trace, b: Trace) -> Diff:
    """Compare two traces state by state."""
    steps, counts, first = max(a.num_steps, b.num_steps), [], None
    for k in range(steps + 1):
        ours, theirs = (_state(trace, k) for trace in (a, b))
        both = min(len(ours), len(theirs))
        unlike = np.ones(max(len(ours), len(theirs)), bool)
        unlike[:both] = ours[:both] != theirs[:both]
        counts.append(int(unlike.sum()))
        if first is None and counts[-1]:
            position = int(unlike.argmax())
            tokens = (int(x[position]) if position < len(x) else None for x in (ours, theirs))
            first = Difference(step=k - 1, position=position, a=next(tokens), b=next(tokens))
    return Diff(a=a, b=b, first=first, counts=tuple(counts), facts=_differing(a.meta, b.meta))


def _state(trace: Trace, k: int) -> np.ndarray:
    k = min(k, trace.num_steps)
    return trace.state(k)[: trace.length_at(k)]


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    a, b = flat(a), flat(b)
    pairs = {key: (a.get(key, ABSENT), b.get(key, ABSENT)) for key in {**a, **b}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _shown(trace: Trace, token: int | None) -> str:
    if token is None:
        return "nothing"
    if token == trace.mask_id:
        return "mask"
    return str(token) if trace.pieces is None else f"{token} {trace.pieces.text([token])!r}"
