"""The settings that decided each step of a forked trace, which the trace stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.trace.reader import TraceReader
from dlm.trace.trace import Trace

KEY = "lineage"
"""In `Trace.own`: one entry a stretch before the fork, {"steps": its end, "was": settings that differ, or null}."""


Parents = TraceReader | Mapping[str, Trace]
"""Where the traces that were forked may be found by id: a `dlm.TraceStore`, or a dict."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps `start` to `stop` - 1 of a trace, decided under one set of settings."""

    start: int
    stop: int
    settings: dict[str, Any] | None
    """Of the sampler, the seed too; None where they are not known, or where other weights decided."""


def settings_of(trace: Trace) -> dict[str, Any]:
    """The sampler's settings that a trace was recorded with, its seed among them."""
    sampler = trace.context.get("sampler")
    if not isinstance(sampler, dict) or trace.context.get("kind") not in ("generate", "infill"):
        name = f"trace {trace.request_id[:60]!r}"
        raise UserError(f"{name} does not say how it was sampled: only what the engine recorded can be run again")
    known = {key: value for key, value in sampler.items() if key in SamplerConfig.model_fields}
    return {**known, "seed": trace.own.get("seed", 0)}


def fork_step(trace: Trace) -> int:
    """The number of steps a trace shares with its parent; 0 for one that is no fork."""
    step = trace.own.get("parent_step", 0)
    if not isinstance(step, int) or not 0 <= step <= trace.num_steps:
        raise UserError(f"trace {trace.request_id[:60]!r}: parent_step = {step!r}: it has steps 0 to {trace.num_steps}")
    return step


def stretches(trace: Trace, parents: Parents | None = None) -> list[Stretch]:
    """The trace's steps in order, cut where other settings took over. The last stretch is the trace's own.

    A fork says itself how its first steps were decided; one that does not (recorded by an earlier version) is looked
    up among `parents`.
    """
    first, weights = trace, trace.context.get("weights")
    found: list[Stretch] = []
    stop, seen = trace.num_steps, set[str]()
    while True:
        own = settings_of(trace) if trace.context.get("weights") == weights else None
        start = min(fork_step(trace), stop)
        if start < stop or not found:
            found.append(Stretch(start=start, stop=stop, settings=own))
        stop = start
        if stop == 0:
            break
        if KEY in trace.own:
            found += reversed(_read(trace, own, stop))
            break
        parent = trace.own.get("parent")
        if parents is None or not isinstance(parent, str) or parent in seen or parent not in parents:
            found.append(Stretch(start=0, stop=stop, settings=None))
            break
        seen.add(parent)
        trace = parents[parent]
    found.reverse()
    assert found[-1].stop == first.num_steps
    return list(_merged(found))


def lineage(parent: Trace, step: int, child: Trace) -> list[dict[str, Any]]:
    """What a child of `parent`, forked at `step`, stores of the steps before: the end and settings of each stretch."""
    settings, entries = settings_of(child), []
    same_weights = parent.context.get("weights") == child.context.get("weights")
    for stretch in stretches(parent):
        if stretch.start < step:
            then = stretch.settings if same_weights else None
            was = None if then is None else {key: value for key, value in then.items() if settings.get(key) != value}
            entries.append({"steps": min(stretch.stop, step), "was": was})
    return entries


def _read(trace: Trace, own: dict[str, Any] | None, stop: int) -> list[Stretch]:
    """The stretches before `stop`, from a trace's own facts."""
    entries, start = trace.own[KEY], 0
    found: list[Stretch] = []
    try:
        for entry in entries:
            end, was = min(int(entry["steps"]), stop), entry["was"]
            settings = None if was is None or own is None else {**own, **was}
            if start < end:
                found.append(Stretch(start=start, stop=end, settings=settings))
            start = max(start, end)
    except (TypeError, KeyError, ValueError):
        raise UserError(f"trace {trace.request_id[:60]!r}: its lineage cannot be understood: {entries!r:.80}") from None
    if start < stop:
        found.append(Stretch(start=start, stop=stop, settings=None))
    return found


def _merged(found: list[Stretch]) -> Iterable[Stretch]:
    """Neighbours with equal settings as one."""
    start = found[0].start
    for stretch, after in pairwise(found):
        if stretch.settings is None or stretch.settings != after.settings:
            yield replace(stretch, start=start)
            start = after.start
    yield replace(found[-1], start=start)
