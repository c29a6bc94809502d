"""A trace and its model: run again and compare, follow what was recorded, go on from a step. Stores nothing."""

from dataclasses import asdict, dataclass, replace
from secrets import token_hex
from typing import Any, cast

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.decoding import Decoding, continuations, infillings
from dlm.inference.engine import Engine
from dlm.inference.recording import Recording, Store
from dlm.inference.request import Generation
from dlm.inference.sequence import Decision, Sequence
from dlm.models.lm import LM, require_lm
from dlm.trace.record import Recorder
from dlm.trace.trace import ACCEPT, GIVEN, MASK, REJECT, REPLACE, SET, Trace


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

    @property
    def identical(self) -> bool:
        return self.position is None and self.same_steps == self.num_steps

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical}

    def __str__(self) -> str:
        lines = [f"identical at {self.same_steps} of {self.num_steps} steps"]
        if not self.identical:
            near = "" if self.margin is None else f"; best over second there: {self.margin:.3g}"
            where = (
                "another number of steps"
                if self.position is None
                else (f"position {self.position}: recorded {self.recorded}, now {self.actual}{near}")
            )
            lines = [f"differs at step {self.same_steps}, {where}"]
        lines += [f"  {name}: {then} then, {now} now" for name, (then, now) in self.environment.items()]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Forced:
    """The model's opinion of what was recorded, each token at the step that committed it."""

    log_probability: Float32[ndarray, " l"]
    """Of the token each position ended with; NaN where it was given."""

    @property
    def total(self) -> float:
        return float(np.nansum(self.log_probability))


def verify(lm: LM, trace: Trace) -> Verification:
    """Run the request again from its prompt, and find the first step that does something else."""
    again, now = _run(lm, trace, keep=("topk",))
    differences = {
        name: (trace.context.get(name), now.get(name))
        for name in ("weights", "dtype", "device", "threads", "versions", "tokenizer")
        if trace.context.get(name) != now.get(name)
    }
    facts = {"request_id": trace.request_id, "num_steps": trace.num_steps, "environment": differences}
    for k in range(1, min(trace.num_steps, again.num_steps) + 1):
        recorded, actual = trace.state(k)[: trace.length_at(k)], again.state(k)[: again.length_at(k)]
        shared = min(len(recorded), len(actual))
        unlike = np.flatnonzero(recorded[:shared] != actual[:shared])
        if len(unlike) or len(recorded) != len(actual):
            position = int(unlike[0]) if len(unlike) else shared
            told = [int(c[position]) if position < len(c) else trace.mask_id for c in (recorded, actual)]
            margin = _margin(again, position, k - 1)
            return Verification(
                same_steps=k - 1, position=position, recorded=told[0], actual=told[1], margin=margin, **facts
            )
    same = min(trace.num_steps, again.num_steps)
    ahead = again.num_steps != trace.num_steps
    return Verification(same_steps=same - ahead, **facts)


def force(lm: LM, trace: Trace) -> Forced:
    """Follow the recorded order, and ask the model at each step how likely it found what was committed."""
    again, _ = _run(lm, trace, upto=trace.num_steps, keep=("confidence",))
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
    if not 0 <= step <= trace.num_steps:
        raise UserError(f"fork(): step = {step}: trace {trace.request_id[:60]!r} has steps 0 to {trace.num_steps}")
    fixed = [name for name in ("gen_length", "block_length", "max_gen_length") if name in settings]
    if fixed:
        raise UserError(f"fork(): {fixed[0]} cannot change in the middle of a request")
    name = request_id or f"{trace.request_id[:200]}-{token_hex(4)}"
    return _run(lm, trace, step, settings, name, {"parent": trace.request_id, "parent_step": step})[0]


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
        width = len(seq.columns)
        token, flags = np.zeros(width, np.int64), np.full(width, GIVEN)
        column = {int(position): i for i, position in enumerate(seq.columns)}
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
    upto: int = 0,
    settings: dict[str, Any] | None = None,
    name: str | None = None,
    meta: dict[str, Any] | None = None,
    keep: tuple[str, ...] = (),
) -> tuple[Trace, dict[str, Any]]:
    """The request once more, the first `upto` steps as recorded; its trace, and what is told of this environment."""
    require_lm(lm, "replay")
    decoding = _decoding(lm, trace, name or trace.request_id, settings or {})
    store = _Once(keep or tuple(_kept(trace)), 4 if trace.topk_tokens is None else trace.topk_tokens.shape[1])
    engine = Engine(lm, **_engine(trace, decoding), trace=cast(Store, store))
    engine.submit(decoding, _Script(trace, upto), meta)
    _drain(engine)
    assert store.made is not None and isinstance(engine.recording, Recording)
    return store.made.trace(), engine.recording.common


def _drain(engine: Engine) -> Generation:
    for event in engine.stream():
        if event.error is not None:
            raise UserError(f"request {event.request_id!r}: {event.error}")
        if event.result is not None:
            return event.result
    raise AssertionError("an engine ended without a result")


def _decoding(lm: LM, trace: Trace, name: str, changes: dict[str, Any]) -> Decoding:
    """The request as it was asked for."""
    sampler, own = trace.context.get("sampler"), trace.own
    kind = trace.context.get("kind")
    if not isinstance(sampler, dict) or kind not in ("generate", "infill"):
        raise UserError(
            f"trace {trace.request_id[:60]!r} does not say how it was sampled: only what the engine recorded can be run again"
        )
    known = {key: value for key, value in sampler.items() if key in SamplerConfig.model_fields}
    asked = {**known, "seed": own.get("seed", 0), **changes}
    start = trace.state(0)
    given = trace.first_step == GIVEN
    prompt = (
        start.tolist() if kind == "infill" else start[: int(np.argmin(given)) if not given.all() else None].tolist()
    )
    if any(token < 0 for token in prompt):
        raise UserError(f"trace {trace.request_id[:60]!r} was stored without its prompt: it cannot be run again")
    if kind == "infill":
        asked.pop("gen_length", None)
    make = infillings if kind == "infill" else continuations
    decoding = make(lm, [prompt], asked, where=f"trace {trace.request_id[:60]!r}", request_ids=[name])[0]
    return replace(decoding, request=replace(decoding.request, sample=own.get("sample", 0)))


def _engine(trace: Trace, decoding: Decoding) -> dict[str, Any]:
    """The settings of an engine like the one that recorded it, with room for this request."""
    told = {key: value for key, value in trace.context.get("engine", {}).items() if value is not None}
    page, lanes = told.get("page_size", 32), 2 if decoding.settings.cfg_scale > 0 else 1
    length = max(1, decoding.plan.length(decoding.request))
    return {**told, "num_pages": -(-length // page) * lanes, "max_num_tokens": max(8192, length * lanes)}


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
