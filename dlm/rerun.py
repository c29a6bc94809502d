"""Decodes a recorded request again, with an engine like the one that recorded it."""

from dataclasses import replace
from typing import Any, cast

import numpy as np

from dlm import config as toml
from dlm.errors import UserError
from dlm.inference.canvas import Decision
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.decoding import Decoding, continuations, infillings
from dlm.inference.drafting.making import SELF
from dlm.inference.drafting.recorded import Recorded
from dlm.inference.engine import Engine
from dlm.inference.recording import Recording, Store
from dlm.inference.sequence import Sequence
from dlm.lineage import settings_of
from dlm.models.lm import LM
from dlm.models.required import require_lm
from dlm.trace.events import ACCEPT, GIVEN, MASK, REJECT, REPLACE, SET
from dlm.trace.record import Recorder
from dlm.trace.trace import Trace


class _Script:
    """A script that repeats a trace's decisions up to a step; after that the rule decides."""

    def __init__(self, trace: Trace, upto: int) -> None:
        self.upto = upto
        self.events: dict[int, list[Any]] = {}
        for event in trace.events():
            self.events.setdefault(event.step, []).append(event)

    def leads(self, step: int) -> bool:
        return step < self.upto

    def decision(self, seq: Sequence, proposed: Decision) -> Decision:
        if seq.step >= self.upto:
            return proposed
        width = len(seq.canvas.columns)
        token, flags = np.zeros(width, np.int64), np.full(width, GIVEN)
        drafted = np.full(width, -1) if proposed.drafted is not None else None
        column = {int(position): i for i, position in enumerate(seq.canvas.columns)}
        for event in self.events.get(seq.step, ()):
            if event.position not in column:
                raise UserError(
                    f"step {event.step} of the trace changes position {event.position}, which is not open then: it "
                    "was recorded with other settings than it says"
                )
            at = column[event.position]
            if drafted is not None and event.kind in (ACCEPT, REJECT):
                drafted[at] = event.token
            if event.kind != REJECT:
                token[at], flags[at] = event.token, SET if event.kind == ACCEPT else event.kind
        return Decision(token, flags == SET, flags == REPLACE, flags == MASK, drafted=drafted)


class _Once:
    """A store for one run: it gives out one recorder and keeps nothing."""

    def __init__(self, keep: tuple[str, ...], topk: int) -> None:
        self.keep, self.topk = keep, topk
        self.made: Recorder | None = None

    def add_tokenizer(self, tokenizer: str, content: str) -> None:
        pass

    def recorder(self, request_id: str, prompt: Any, **facts: Any) -> Recorder:
        self.made = Recorder(request_id, prompt, keep=self.keep, topk=self.topk, **facts)
        return self.made


def rerun(
    lm: LM,
    trace: Trace,
    upto: int,
    settings: dict[str, Any] | None = None,
    *,
    name: str | None = None,
    meta: dict[str, Any] | None = None,
    keep: tuple[str, ...] = (),
    until: int | None = None,
    draft: Any = None,
) -> tuple[Trace, dict[str, Any]]:
    """The trace of a second run, and the facts of this environment: weights, versions and so on.

    The first `upto` steps follow the recorded ones; the run ends after `until` steps. `settings` replace the sampler's.
    Drafts are those that the trace holds, unless a `draft` is given.
    """
    require_lm(lm, "replay")
    if trace.context.get("draft") == SELF:  # which makes the same steps as no draft
        settings = {**(settings or {}), "draft_length": None}
    elif "draft" in trace.context and draft is None:
        draft = _drafts(trace)
        settings = {**(settings or {}), **({"draft_length": None} if isinstance(draft, Recorded) else {})}
    decoding = _decoding(lm, trace, name or trace.request_id, settings or {})
    store = _Once(keep or tuple(_kept(trace)), 4 if trace.topk_tokens is None else trace.topk_tokens.shape[1])
    engine = Engine.of(lm, _engine(trace, decoding), trace=cast(Store, store), draft=draft)
    engine.submit(decoding, _Script(trace, upto), meta)
    assert store.made is not None and isinstance(engine.recording, Recording)
    while engine.has_work and (until is None or store.made.num_steps < until):
        for event in engine.step():
            if event.error is not None:
                raise UserError(f"request {event.request_id!r}: {event.error}")
    return store.made.trace(), engine.recording.common


def _drafts(trace: Trace) -> Any:
    """A draft that repeats the recorded drafts."""
    if trace.context["sampler"].get("verify") == "reject":
        raise UserError(
            f'trace {trace.request_id[:60]!r} was written with verify = "reject", whose text depends on what its draft '
            f"{trace.context['draft']!r} gave each token: give that draft (draft=…, --draft)"
        )
    tokens: dict[int, list[int]] = {}
    for event in trace.events():
        if event.kind in (ACCEPT, REJECT):
            tokens.setdefault(event.step, []).append(event.token)
    return Recorded(tokens, trace.context["draft"])


def _decoding(lm: LM, trace: Trace, name: str, changes: dict[str, Any]) -> Decoding:
    # Traces older than the setting `allow_long` may be long.
    settings, kind = {"allow_long": True, **settings_of(trace), **changes}, trace.context["kind"]
    start = trace.state(0)
    prompt = (start if kind == "infill" else start[: trace.prompt_length]).tolist()
    if any(token < 0 for token in prompt):
        raise UserError(f"trace {trace.request_id[:60]!r} was stored without its prompt: it cannot be run again")
    make, where = infillings if kind == "infill" else continuations, f"trace {trace.request_id[:60]!r}"
    decoding = make(lm, [prompt], toml.check(SamplerConfig, settings, where), where=where, request_ids=[name])[0]
    return replace(decoding, request=replace(decoding.request, sample=trace.own.get("sample", 0)))


def _engine(trace: Trace, decoding: Decoding) -> EngineConfig:
    """The settings of an engine like the one that recorded it, with room for this request."""
    recorded = {key: value for key, value in trace.context.get("engine", {}).items() if value is not None}
    like = EngineConfig(**recorded)
    like = like.with_cache(recorded["cache"]) if "cache" in recorded else like
    length, branches = max(1, decoding.plan.length(decoding.request)), 2 if decoding.settings.cfg_scale > 0 else 1
    room = {"num_pages": -(-length // like.page_size) * branches, "max_num_tokens": max(8192, length * branches)}
    return like.model_copy(update=room)


def _kept(trace: Trace) -> list[str]:
    columns = {"confidence": trace.confidence, "topk": trace.topk_tokens, "digests": trace.digests or None}
    return [name for name, column in columns.items() if column is not None]
