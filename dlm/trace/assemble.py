"""Builds traces from events, from a step map, or from all canvases of a sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.errors import UserError
from dlm.trace.events import ACCEPT, GIVEN, MASK, NEVER, NO_EVENTS, NO_MASK, REJECT, REPLACE, SET, Later
from dlm.trace.trace import Trace

if TYPE_CHECKING:
    from jaxtyping import Int
    from numpy import ndarray


def from_map(
    request_id: str,
    tokens: Int[ndarray, " l"],
    steps: Int[ndarray, " l"],
    mask_id: int | None,
    num_steps: int | None = None,
    confidence: ndarray | None = None,
    **facts: Any,
) -> Trace:
    """The trace of a canvas that was never revised: its final tokens and the step each was committed at.

    A step of -1 means given, except where the token is the mask: that position was never filled.
    """
    tokens, steps = np.array(tokens, np.int32), np.array(steps, np.int32)
    if tokens.shape != steps.shape or tokens.ndim != 1:
        raise UserError(f"trace {request_id[:60]!r}: tokens {tokens.shape} and steps {steps.shape} must be a row each")
    if mask_id is not None:
        steps[(steps < 0) & (tokens == mask_id)] = NEVER
    filled = (steps >= 0) & (steps != NEVER)
    last = int(steps[filled].max()) + 1 if filled.any() else 0
    if num_steps is not None and num_steps < last:
        raise UserError(f"trace {request_id[:60]!r}: a token of step {last - 1}, but num_steps = {num_steps}")
    return Trace(
        request_id=request_id,
        mask_id=NO_MASK if mask_id is None else mask_id,
        num_steps=last if num_steps is None else num_steps,
        first_step=np.where(steps < 0, GIVEN, steps).astype(np.int32),
        first_token=tokens,
        confidence=None if confidence is None else np.where(filled, confidence, np.nan).astype(np.float16),
        **facts,
    )


def from_states(request_id: str, states: Sequence[Any], mask_id: int | None = None, **facts: Any) -> Trace:
    """The trace that shows these canvases, the first of them before any step; later ones may be longer."""
    canvases = [np.array(state, np.int32) for state in states]
    mask = mask_of(canvases) if mask_id is None else mask_id
    columns, growth = [], [(GIVEN, len(canvases[0]))]
    for step, (before, after) in enumerate(pairwise(canvases)):
        if len(after) > len(before):
            growth.append((step, len(after)))
            before = np.concatenate((before, np.full(len(after) - len(before), mask, np.int32)))
        columns.append(changes(step, before, after, mask))
    return from_events(
        request_id,
        canvases[0],
        np.concatenate(columns, axis=1) if columns else np.zeros((4, 0), np.int32),
        mask_id=mask,
        num_steps=len(canvases) - 1,
        growth=growth,
        **facts,
    )


def changes(step: int, before: Int[ndarray, " l"], after: Int[ndarray, " l"], mask: int) -> Int[ndarray, "4 n"]:
    """Events (step, position, kind, token) that lead from one canvas to the next."""
    if len(after) != len(before):
        raise UserError(f"step {step}: the canvas shrank from {len(before)} to {len(after)} tokens; it may only grow")
    position = np.flatnonzero(before != after)
    old, new = before[position], after[position]
    kind = np.where(old == mask, SET, np.where(new == mask, MASK, REPLACE))
    return np.stack((np.full(len(position), step), position, kind, new)).astype(np.int32)


def mask_of(canvases: Sequence[Int[ndarray, " l"]]) -> int:
    """The token that positions change from most often; without any change, none."""
    left: Counter[int] = Counter()
    for before, after in pairwise(canvases):
        both = min(len(before), len(after))
        left.update(before[:both][before[:both] != after[:both]].tolist())
    return left.most_common(1)[0][0] if left else NO_MASK


def from_events(
    request_id: str,
    initial: Int[ndarray, " l"],
    events: Int[ndarray, "4 n"],
    *,
    mask_id: int | None,
    num_steps: int,
    growth: Sequence[tuple[int, int]] = (),
    confidence: ndarray | None = None,
    topk: tuple[ndarray, ndarray] | None = None,
    **facts: Any,
) -> Trace:
    """The trace of a first canvas and its events: rows step, position, kind, token, in the order they happened.

    `growth` is (step, length) where the canvas became longer, (-1, length) first. `confidence` (n,) and `topk`, tokens
    and logits (n, k), go with the events, `facts` with the trace. Raises UserError where an event contradicts the canvas.
    """
    mask = NO_MASK if mask_id is None else mask_id
    step, position, kind, token = (np.ascontiguousarray(row, np.int32) for row in events)
    length = max((len(initial), *(size for _, size in growth), int(position.max()) + 1 if len(position) else 0))
    first_token = np.full(length, mask, np.int32)
    first_token[: len(initial)] = initial
    given = first_token != mask
    if mask_id is None:  # without a mask any token may be given: what the first canvas holds
        given = np.arange(length) < len(initial)
    first_step = np.where(given, np.int32(GIVEN), np.int32(NEVER))
    _check_order(request_id, step, num_steps)
    counts = np.flatnonzero(kind != REJECT)
    _, firsts = np.unique(position[counts], return_index=True)
    firsts = counts[firsts]  # each position's first event that changes it
    firsts = firsts[~given[position[firsts]]]
    wrong = firsts[(kind[firsts] != SET) & (kind[firsts] != ACCEPT)]
    if len(wrong):
        i = int(wrong[0])
        raise UserError(f"trace {request_id[:60]!r}: step {step[i]} revises position {position[i]}, which has no token")
    first_step[position[firsts]], first_token[position[firsts]] = step[firsts], token[firsts]
    others = np.ones(len(step), bool)
    others[firsts] = False
    rest = np.flatnonzero(others)
    accepted = None
    if (kind[firsts] == ACCEPT).any():
        accepted = np.zeros(length, bool)
        accepted[position[firsts]] = kind[firsts] == ACCEPT
    later = NO_EVENTS
    if len(rest):
        later = Later(step=step[rest], position=position[rest], kind=kind[rest], token=token[rest])

    def beside(values: ndarray, blank: float, kind: type) -> ndarray:
        """The events' values in a trace's order: by position for first tokens, then the later events."""
        out = np.full((length + len(rest), *values.shape[1:]), blank, kind)
        out[position[firsts]], out[length:] = values[firsts], values[rest]
        return out

    found: dict[str, Any] = {"first_step": first_step, "first_token": first_token, "later": later, "accepted": accepted}
    if len(growth) > 1:
        found["growth"] = np.array(growth, np.int32)
    if confidence is not None:
        found["confidence"] = beside(np.asarray(confidence), np.nan, np.float16)
    if topk is not None:
        found["topk_tokens"] = beside(np.asarray(topk[0]), -1, np.int32)
        found["topk_logits"] = beside(np.asarray(topk[1]), np.nan, np.float16)
    return Trace(request_id=request_id, mask_id=mask, num_steps=num_steps, **found, **facts)


def _check_order(request_id: str, step: Int[ndarray, " n"], num_steps: int) -> None:
    if len(step) and (int(step[0]) < 0 or (np.diff(step) < 0).any() or int(step[-1]) >= num_steps):
        raise UserError(f"trace {request_id[:60]!r}: events must come step by step, from 0 to {num_steps - 1}")


def plain(values: Any) -> ndarray:
    """A numpy array of a tensor, an array or a list, without importing torch."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def row_of(values: Any, kind: type = np.int32) -> ndarray:
    """One row: (l,), or (1, l)."""
    row = plain(values)
    row = row[0] if row.ndim == 2 and len(row) == 1 else row
    if row.ndim != 1:
        raise UserError(f"a recorder of one request takes (l,) or (1, l) ids, not {row.shape}")
    return row.astype(kind, copy=False)
