"""Runs a trace's model again: to verify the trace, to score its tokens, or to go on from a step with other settings."""

from dataclasses import asdict, dataclass
from functools import partial
from secrets import token_hex
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from dlm import config as toml
from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.readers import FILLS, SAMPLER_READERS
from dlm.lineage import KEY, Parents, fork_step, lineage, settings_of, stretches
from dlm.models.lm import LM
from dlm.models.required import require_lm
from dlm.reading import unread
from dlm.rerun import rerun
from dlm.trace.events import ACCEPT, REPLACE, SET
from dlm.trace.pieces import Pieces
from dlm.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How a second run compares with what was recorded."""

    request_id: str
    num_steps: int
    """Steps recorded."""
    same_steps: int
    """Steps before the first that differs."""
    position: int | None = None
    """The lowest position at which that step differs."""
    recorded: int | None = None
    """The token there after that step; the mask id where there is none."""
    actual: int | None = None
    margin: float | None = None
    """Logit of the second run's best token there minus that of its runner-up: near 0, rounding alone may have decided."""
    environment: dict[str, tuple[Any, Any]]
    """What differs between then and now: weights, dtype, device, threads, versions, tokenizer."""
    parent: str | None = None
    """The trace it was forked from."""
    shared_steps: int = 0
    """Steps it shares with that one."""
    shared_check: Literal["run again", "as recorded"] = "run again"
    """Whether those were run under the settings that made them, or only followed as recorded because their settings
    are unknown or other weights made them."""

    @property
    def identical(self) -> bool:
        return self.position is None and self.same_steps == self.num_steps

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical}

    def __str__(self) -> str:
        lines = [f"identical at {self.same_steps} of {self.num_steps} steps{self._shared()}"]
        if not self.identical:
            near = "" if self.margin is None else f"; best over second there: {self.margin:.3g}"
            where = f"position {self.position}: recorded {self.recorded}, now {self.actual}{near}"
            where = "another number of steps" if self.position is None else where
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


def verify(lm: LM, trace: Trace, parents: Parents | None = None, draft: Any = None) -> Verification:
    """Run the request again from its prompt, and find the first step that differs.

    The steps that a fork shares with its parent are run under the settings they were made with, which the fork keeps.
    Forks of earlier versions do not: their parents are looked up among `parents` (a store, or a dict by id), and steps
    whose settings are found nowhere are followed as recorded. What was drafted is in the trace: its draft is needed only
    where `verify = "reject"`, whose text depends on it.
    """
    require_lm(lm, "verify()")
    parts = stretches(trace, parents)
    again, now = rerun(lm, trace, parts[-1].start, parts[-1].settings, keep=("topk",), draft=draft)
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
            before, _ = rerun(lm, trace, part.start, part.settings, keep=("topk",), until=part.stop, draft=draft)
            if (parted := _parting(trace, before, part.stop)) is not None:
                return Verification(**parted, **facts)
    if (parted := _parting(trace, again, trace.num_steps)) is not None:
        return Verification(**parted, **facts)
    ahead = again.num_steps != trace.num_steps
    return Verification(same_steps=trace.num_steps - ahead, **facts)


def _parting(trace: Trace, again: Trace, until: int) -> dict[str, Any] | None:
    """Where a second run's first `until` steps leave what was recorded; None where they do not."""
    for k in range(1, min(until, again.num_steps) + 1):
        recorded, actual = trace.state(k)[: trace.length_at(k)], again.state(k)[: again.length_at(k)]
        shared = min(len(recorded), len(actual))
        unlike = np.flatnonzero(recorded[:shared] != actual[:shared])
        if len(unlike) or len(recorded) != len(actual):
            position = int(unlike[0]) if len(unlike) else shared
            tokens = [int(c[position]) if position < len(c) else trace.mask_id for c in (recorded, actual)]
            margin = _margin(again, position, k - 1)
            parted = {"position": position, "recorded": tokens[0], "actual": tokens[1], "margin": margin}
            return {"same_steps": k - 1, **parted}
    return {"same_steps": again.num_steps} if again.num_steps < until else None


def force(lm: LM, trace: Trace) -> Forced:
    """How likely the model finds each recorded token, at the step that committed it."""
    again, _ = rerun(lm, trace, trace.num_steps, keep=("confidence",))
    log = np.full(trace.length, np.nan, np.float32)
    for event in again.events():
        if event.kind in (SET, REPLACE, ACCEPT) and event.confidence is not None:
            log[event.position] = np.log(max(event.confidence, 1e-38))
    return Forced(log_probability=log)


def fork(lm: LM, trace: Trace, step: int, request_id: str | None = None, **settings: Any) -> Trace:
    """A new trace: the recorded steps up to `step`, then the model's own, under these settings of the sampler.

    With nothing changed it is the original again; with another seed it shares the first `step` states. The block
    structure (gen_length, block_length) and the kind of strategy stay. Raises UserError for settings that do not fit.
    """
    if not isinstance(step, int) or not 0 <= step <= trace.num_steps:
        where = f"trace {trace.request_id[:60]!r} has steps 0 to {trace.num_steps}"
        raise UserError(f"fork(): step = {step!r:.40}: {where}")
    fixed = [name for name in ("gen_length", "block_length", "max_gen_length", *FILLS) if name in settings]
    if fixed:
        raise UserError(f"fork(): {fixed[0]} cannot change in the middle of a request")
    name = request_id or f"{trace.request_id[:200]}-{token_hex(4)}"
    if settings:
        changed = toml.check(SamplerConfig, {**settings_of(trace), **settings}, "fork()")
        if (problem := unread(changed, SAMPLER_READERS, settings)) is not None:
            raise UserError(f"fork(): {problem}")
    child, _ = rerun(lm, trace, step, settings, name=name, meta={"parent": trace.request_id, "parent_step": step})
    child.own = {**child.own, KEY: lineage(trace, step, child)}
    child.source = partial(_pieces, lm, trace)
    return child


def _pieces(lm: LM, parent: Trace, tokenizer: str) -> Pieces | None:
    """The text of a fork's tokens: its parent's, or that of the model's own tokenizer."""
    if parent.pieces is not None and parent.meta.get("tokenizer") == tokenizer:
        return parent.pieces
    own = lm.tokenizer
    return Pieces.of_tokenizer(own.backend.to_str()) if own is not None and own.fingerprint == tokenizer else None


def _margin(trace: Trace, position: int, step: int) -> float | None:
    """Best logit minus the second of what `step` committed there; None where it committed nothing there."""
    if trace.topk_logits is None or position >= trace.length or trace.first_step[position] != step:
        return None
    best = trace.topk_logits[position]
    return float(best[0]) - float(best[1]) if len(best) > 1 else None
