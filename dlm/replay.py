"""A trace and its model: run again and compare, follow what was recorded, go on from a step. Stores nothing."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from secrets import token_hex
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from dlm import config as toml
from dlm.errors import UserError
from dlm.inference.canvas import Decision
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.decoding import Decoding, continuations, infillings
from dlm.inference.engine import Engine
from dlm.inference.readers import SAMPLER_READERS
from dlm.inference.recording import Recording, Store
from dlm.inference.sequence import Sequence
from dlm.lineage import KEY, Parents, fork_step, lineage, settings_of, stretches
from dlm.models.lm import LM
from dlm.models.required import require_lm
from dlm.reading import unread
from dlm.trace.events import ACCEPT, GIVEN, MASK, REJECT, REPLACE, SET
from dlm.trace.pieces import Pieces
from dlm.trace.record import Recorder
from dlm.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How a re-run compares with what was recorded."""

    request_id: str
    num_steps: int
    """Steps recorded."""
    same_steps: int
    """How many first steps were the same."""
    position: int | None = None
    """Where the first step that differs does, first."""
    recorded: int | None = None
    """The token that stood there after it; the mask id where none did."""
    actual: int | None = None
    margin: float | None = None
    """Logit of the re-run's best token there over its second: how near the two were to change places."""
    environment: dict[str, tuple[Any, Any]]
    """What was different, then and now: weights, dtype, device, versions."""
    parent: str | None = None
    """The trace it was forked from."""
    shared_steps: int = 0
    """Steps it shares with that one."""
    shared_check: Literal["run again", "as recorded"] = "run again"
    """How those were checked: run under the settings they were made with or, where these (or the weights) are not at
    hand, only followed as they were recorded, to judge the steps after them."""

    @property
    def identical(self) -> bool:
        return self.position is None and self.same_steps == self.num_steps

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical}

    def __str__(self) -> str:
        lines = [f"identical at {self.same_steps} of {self.num_steps} steps{self._shared()}"]
        if not self.identical:
            near = "" if self.margin is None else f"; best over second there: {self.margin:.3g}"
            where = (
                "another number of steps"
                if self.position is None
                else (f"position {self.position}: recorded {self.recorded}, now {self.actual}{near}")
            )
            lines = [f"differs at step {self.same_steps}, {where}{self._shared()}"]
        lines += [f"  {name}: {then} then, {now} now" for name, (then, now) in self.environment.items()]
        return "\n".join(lines)

    def _shared(self) -> str:
        """How the steps before the fork were checked; nothing for a trace that is no fork."""
        if self.parent is None:
            return ""
        how = "run again under its settings"
        if self.shared_check == "as recorded":
            how = "only followed as recorded: its settings are not at hand, or other weights made them"
        return f" (the first {self.shared_steps} are those of its parent {self.parent[:60]!r}, {how})"


@dataclass(frozen=True, kw_only=True)
class Forced:
    """The model's opinion of what was recorded, each token at the step that committed it."""

    log_probability: Float32[ndarray, " l"]
    """Of the token each position ended with; NaN where it was given."""

    @property
    def total(self) -> float:
        return float(np.nansum(self.log_probability))


def verify(lm: LM, trace: Trace, parents: Parents | None = None) -> Verification:
    """Run the request again from its prompt, and find the first step that does something else.

    The steps that a fork shares with its parent are run under the settings they were made with, which the fork keeps.
    Forks of earlier versions do not: their parents are looked up among `parents` (a store, or a dict by id), and steps
    whose settings are found nowhere are followed as recorded.
    """
    require_lm(lm, "verify()")
    parts = stretches(trace, parents)
    again, now = _run(lm, trace, parts[-1].start, parts[-1].settings, keep=("topk",))
    differences = {
        name: (trace.context.get(name), now.get(name))
        for name in ("weights", "dtype", "device", "threads", "versions", "tokenizer")
        if trace.context.get(name) != now.get(name)
    }
    facts: dict[str, Any] = {"request_id": trace.request_id, "num_steps": trace.num_steps, "environment": differences}
    if "parent" in trace.own:
        unknown = any(part.settings is None for part in parts)
        facts |= {"parent": str(trace.own["parent"]), "shared_steps": fork_step(trace)}
        facts |= {"shared_check": "as recorded" if unknown else "run again"}
    for part in parts[:-1]:
        if part.settings is not None:
            before, _ = _run(lm, trace, part.start, part.settings, keep=("topk",), until=part.stop)
            if (parted := _parting(trace, before, part.stop)) is not None:
                return Verification(**parted, **facts)
    if (parted := _parting(trace, again, trace.num_steps)) is not None:
        return Verification(**parted, **facts)
    ahead = again.num_steps != trace.num_steps
    return Verification(same_steps=trace.num_steps - ahead, **facts)


def _parting(trace: Trace, again: Trace, until: int) -> dict[str, Any] | None:
    """Where a re-run's first `until` steps part from what was recorded; None where they do not."""
    for k in range(1, min(until, again.num_steps) + 1):
        recorded, actual = trace.state(k)[: trace.length_at(k)], again.state(k)[: again.length_at(k)]
        shared = min(len(recorded), len(actual))
        unlike = np.flatnonzero(recorded[:shared] != actual[:shared])
        if len(unlike) or len(recorded) != len(actual):
            position = int(unlike[0]) if len(unlike) else shared
            tokens = [int(c[position]) if position < len(c) else trace.mask_id for c in (recorded, actual)]
            margin = _margin(again, position, k - 1)
            return {
                "same_steps": k - 1,
                "position": position,
                "recorded": tokens[0],
                "actual": tokens[1],
                "margin": margin,
            }
    return {"same_steps": again.num_steps} if again.num_steps < until else None


def force(lm: LM, trace: Trace) -> Forced:
    """Follow the recorded order, and ask the model at each step how likely it found what was committed."""
    again, _ = _run(lm, trace, trace.num_steps, keep=("confidence",))
    log = np.full(trace.length, np.nan, np.float32)
    for event in again.events():
        if event.kind in (SET, REPLACE, ACCEPT) and event.confidence is not None:
            log[event.position] = np.log(max(event.confidence, 1e-38))
    return Forced(log_probability=log)


def fork(lm: LM, trace: Trace, step: int, request_id: str | None = None, **settings: Any) -> Trace:
    """The recorded steps up to `step`, then the model's own, under other settings of the sampler where they are given.

    With nothing changed it is the original again; with another seed it shares the first `step` states. The block
    structure (gen_length, block_length) and the kind of strategy stay. Raises UserError for settings that do not fit.
    """
    if not isinstance(step, int) or not 0 <= step <= trace.num_steps:
        raise UserError(
            f"fork(): step = {step!r:.40}: trace {trace.request_id[:60]!r} has steps 0 to {trace.num_steps}"
        )
    fixed = [name for name in ("gen_length", "block_length", "max_gen_length") if name in settings]
    if fixed:
        raise UserError(f"fork(): {fixed[0]} cannot change in the middle of a request")
    name = request_id or f"{trace.request_id[:200]}-{token_hex(4)}"
    if settings:
        changed = toml.check(SamplerConfig, {**settings_of(trace), **settings}, "fork()")
        if (problem := unread(changed, SAMPLER_READERS, settings)) is not None:
            raise UserError(f"fork(): {problem}")
    child, _ = _run(lm, trace, step, settings, name=name, meta={"parent": trace.request_id, "parent_step": step})
    child.own = {**child.own, KEY: lineage(trace, step, child)}
    child.source = partial(_pieces, lm, trace)
    return child


def _pieces(lm: LM, parent: Trace, tokenizer: str) -> Pieces | None:
    """What the tokens of a fork look like: as its parent's do, or from the model's own tokenizer."""
    if parent.pieces is not None and parent.meta.get("tokenizer") == tokenizer:
        return parent.pieces
    own = lm.tokenizer
    return Pieces.of_tokenizer(own.backend.to_str()) if own is not None and own.fingerprint == tokenizer else None


class _Script:
    """The decisions of a trace, up to a step."""

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
        column = {int(position): i for i, position in enumerate(seq.canvas.columns)}
        for event in self.events.get(seq.step, ()):
            if event.kind != REJECT:
                if event.position not in column:
                    raise UserError(
                        f"step {event.step} of the trace changes position {event.position}, which is not open then: it "
                        "was recorded with other settings than it says"
                    )
                at = column[event.position]
                token[at], flags[at] = event.token, SET if event.kind == ACCEPT else event.kind
        return Decision(token=token, commit=flags == SET, edited=flags == REPLACE, remasked=flags == MASK)


class _Once:
    """A store for one trace, which it does not keep."""

    def __init__(self, keep: tuple[str, ...], topk: int) -> None:
        self.keep, self.topk = keep, topk
        self.made: Recorder | None = None

    def add_tokenizer(self, tokenizer: str, content: str) -> None:
        pass

    def recorder(self, request_id: str, prompt: Any, **facts: Any) -> Recorder:
        self.made = Recorder(request_id, prompt, keep=self.keep, topk=self.topk, **facts)
        return self.made


def _run(
    lm: LM,
    trace: Trace,
    upto: int,
    settings: dict[str, Any] | None = None,
    *,
    name: str | None = None,
    meta: dict[str, Any] | None = None,
    keep: tuple[str, ...] = (),
    until: int | None = None,
) -> tuple[Trace, dict[str, Any]]:
    """The request once more, the first `upto` steps as recorded, no further than `until`; and this environment's facts."""
    require_lm(lm, "replay")
    decoding = _decoding(lm, trace, name or trace.request_id, settings or {})
    store = _Once(keep or tuple(_kept(trace)), 4 if trace.topk_tokens is None else trace.topk_tokens.shape[1])
    engine = Engine.of(lm, _engine(trace, decoding), trace=cast(Store, store))
    engine.submit(decoding, _Script(trace, upto), meta)
    assert store.made is not None and isinstance(engine.recording, Recording)
    while engine.has_work and (until is None or store.made.num_steps < until):
        for event in engine.step():
            if event.error is not None:
                raise UserError(f"request {event.request_id!r}: {event.error}")
    return store.made.trace(), engine.recording.common


def _decoding(lm: LM, trace: Trace, name: str, changes: dict[str, Any]) -> Decoding:
    """The request as it was asked for."""
    # What was recorded before there was `allow_long` may be long.
    asked, kind = {"allow_long": True, **settings_of(trace), **changes}, trace.context["kind"]
    start = trace.state(0)
    given = trace.first_step == GIVEN
    prompt = (
        start.tolist() if kind == "infill" else start[: int(np.argmin(given)) if not given.all() else None].tolist()
    )
    if any(token < 0 for token in prompt):
        raise UserError(f"trace {trace.request_id[:60]!r} was stored without its prompt: it cannot be run again")
    make, where = infillings if kind == "infill" else continuations, f"trace {trace.request_id[:60]!r}"
    decoding = make(lm, [prompt], toml.check(SamplerConfig, asked, where), where=where, request_ids=[name])[0]
    return replace(decoding, request=replace(decoding.request, sample=trace.own.get("sample", 0)))


def _engine(trace: Trace, decoding: Decoding) -> EngineConfig:
    """The settings of an engine like the one that recorded it, with room for this request."""
    told = {key: value for key, value in trace.context.get("engine", {}).items() if value is not None}
    like = EngineConfig(**told).with_cache(told["cache"]) if "cache" in told else EngineConfig(**told)
    length, lanes = max(1, decoding.plan.length(decoding.request)), 2 if decoding.settings.cfg_scale > 0 else 1
    room = {"num_pages": -(-length // like.page_size) * lanes, "max_num_tokens": max(8192, length * lanes)}
    return like.model_copy(update=room)


def _kept(trace: Trace) -> list[str]:
    """What the trace holds beside tokens."""
    columns = {"confidence": trace.confidence, "topk": trace.topk_tokens, "digests": trace.digests or None}
    return [name for name, column in columns.items() if column is not None]


def _margin(trace: Trace, position: int, step: int) -> float | None:
    """Best logit over the second of what a step committed there; None where it did not."""
    if trace.topk_logits is None or position >= trace.length or trace.first_step[position] != step:
        return None
    best = trace.topk_logits[position]
    return float(best[0]) - float(best[1]) if len(best) > 1 else None
