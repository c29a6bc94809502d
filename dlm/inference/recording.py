"""What the engine tells a recorder of each request. Knows neither how a trace is stored nor what it is good for."""

from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import torch

from dlm.errors import UserError
from dlm.inference.canvas import Decision
from dlm.inference.config import EngineConfig
from dlm.inference.readers import FILLS
from dlm.inference.request import Generation, StepEvent
from dlm.inference.sequence import Sequence
from dlm.models.fingerprint import weights_digest
from dlm.models.lm import LM

SET, MASK, REPLACE, ACCEPT, REJECT = range(5)
"""A mask became a token, a token became a mask again, a token became another, a draft was kept, a draft was refused: the
numbers traces use."""
NO_MASK = -1
"""What a trace has in place of a mask where the family has none."""


class Recorder(Protocol):
    """One request's notes."""

    topk: int
    """How many of the likeliest tokens it wants, if "topk" is among what it keeps."""

    @property
    def keep(self) -> Collection[str]: ...

    def commit(
        self,
        step: int,
        positions: np.ndarray,
        tokens: np.ndarray,
        kinds: Any,
        confidence: Any = None,
        topk: Any = None,
        length: int | None = None,
        canvas: Any = None,
    ) -> None: ...
    def finish(self, **meta: Any) -> None: ...
    def drop(self) -> None: ...


class Store(Protocol):
    """Who hands out recorders; `dlm.TraceStore` is one."""

    def recorder(
        self,
        request_id: str,
        prompt: Any,
        *,
        mask_id: int | None,
        length: int | None,
        meta: Mapping[str, Any] | None,
        context: Mapping[str, Any] | None,
    ) -> Recorder | None: ...
    def add_tokenizer(self, tokenizer: str, content: str) -> None:
        """Learn what the tokens of the tokenizer of that fingerprint look like, from its tokenizer.json."""
        ...


class Listener(Protocol):
    """Who gives the requests of an engine their recorders."""

    def begin(self, seq: Sequence, meta: Mapping[str, Any]) -> Recorder | None:
        """A recorder for this request, if it is to have one."""
        ...


class Recording:
    """A store and what all traces of one engine have in common."""

    def __init__(self, store: Store, lm: LM, engine: EngineConfig, cache: str, draft: str = "") -> None:
        if not hasattr(store, "recorder"):
            raise UserError(f"trace = {store!r:.60}: give a dlm.TraceStore, which takes the path of a file")
        self.store, self.lm, self.draft = store, lm, draft
        kept = engine.model_dump(include={"refresh_interval", "cache_delay", "page_size"})
        self.common = facts_of(store, lm, {"engine": {"cache": cache, **kept}})

    def renew(self) -> None:
        """Traces from now on are of the weights as they are now."""
        self.common = {**self.common, "weights": weights_digest(self.lm.network)}

    def begin(self, seq: Sequence, meta: Mapping[str, Any]) -> Recorder | None:
        """A recorder for this request, or None where the store leaves it out. Raises if its id is taken."""
        settings, request, plan = seq.decoding.settings, seq.request, seq.decoding.plan
        unused = ("solver",) if seq.decoding.drafted else ("solver", "draft_length", "verify")
        unused += () if settings.check != "none" else FILLS
        context = {
            **self.common,
            "kind": "infill" if request.holes else "generate",
            "sampler": {
                **settings.model_dump(mode="json", exclude={"seed", "num_samples", "rule", *unused}),
                "rule": _rule(seq),
            },
        }
        if request.gen_length:
            context["sampler"]["block_length"] = plan.length_of_block(None if plan.open_ended else request.gen_length)
        if plan.aligned and not request.holes:
            context["block_start"] = 0
        if seq.decoding.drafted:
            context["draft"] = self.draft
        return self.store.recorder(
            request.request_id,
            list(request.ids),
            mask_id=self.lm.mask_id,
            length=seq.canvas.length,
            meta={"seed": request.seed, "sample": request.sample, **meta},
            context=context,
        )


def facts_of(store: Store, lm: LM, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What all traces of a model have in common; the store learns what its tokens look like."""
    facts = {
        "model": lm.name,
        "weights": weights_digest(lm.network),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else lm.device.type,
        "threads": torch.get_num_threads() if lm.device.type == "cpu" else None,
        "versions": {"dlm": version("dlm"), "torch": torch.__version__},
        **(more or {}),
    }
    if lm.tokenizer is not None:
        facts["tokenizer"] = lm.tokenizer.fingerprint
        store.add_tokenizer(lm.tokenizer.fingerprint, lm.tokenizer.backend.to_str())
    return facts


def note(recorder: Recorder, seq: Sequence, decision: Decision) -> None:
    """Tell what a step changed, before it is applied. The step waits for this: what can be done later is left for then."""
    where, kinds = decision.commit.nonzero()[0], SET
    tokens = decision.token[where]
    if decision.edited is not None and decision.remasked is not None and (decision.edited | decision.remasked).any():
        # In the order of positions, as in a canvas that is compared with the one before.
        where, kinds = _changes(decision.commit, decision.edited, decision.remasked)
        tokens = np.where(kinds == MASK, seq.canvas.mask_id, decision.token[where])
    if decision.drafted is not None:
        where, tokens, kinds = _checked(decision)
    recorder.commit(
        seq.step,
        seq.canvas.columns[where],
        tokens,
        kinds,
        confidence=None if decision.confidence is None else decision.confidence[where],
        topk=None if decision.topk is None else tuple(part[where] for part in decision.topk),
        length=seq.canvas.length,
        canvas=_canvas(seq, decision) if "digests" in recorder.keep else None,
    )


def note_masked(recorder: Recorder, seq: Sequence) -> None:
    """Tell that all holes are masked again, in a step of their own."""
    canvas = seq.canvas
    where = np.array([at for hole in seq.request.holes for at in hole])
    masked = canvas.tokens[: canvas.length].copy()
    masked[where] = canvas.mask_id
    recorder.commit(
        seq.step,
        where,
        masked[where],
        np.full(len(where), MASK),
        length=canvas.length,
        canvas=masked if "digests" in recorder.keep else None,
    )


def _canvas(seq: Sequence, decision: Decision) -> np.ndarray:
    """The canvas after a step, as its trace shows it: a family without a mask has a mark of its own there."""
    canvas = seq.canvas.after(decision)
    if decision.drafted is not None and seq.config.mask_token_id is None:
        canvas[seq.canvas.columns[~decision.commit]] = NO_MASK
    return canvas


def _checked(decision: Decision) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What became of drafts: columns, tokens and kinds, those refused before what took their place."""
    drafted, commit = decision.drafted, decision.commit
    assert drafted is not None
    kept = commit & (drafted == decision.token)
    refused, made = np.flatnonzero((drafted >= 0) & ~kept), np.flatnonzero(commit)
    where = np.concatenate((refused, made))
    tokens = np.concatenate((drafted[refused], decision.token[made]))
    kinds = np.concatenate((np.full(len(refused), REJECT), np.where(kept[made], ACCEPT, SET)))
    order = np.argsort(where, kind="stable")
    return where[order], tokens[order], kinds[order]


def listening(recorders: Mapping[str, Recorder]) -> Callable[[StepEvent], None]:
    """An `on_step` for samplers that know no recorders, the reference sampler above all: tells each request's its tokens.

    Whoever made the recorders finishes them.
    """

    def on_step(event: StepEvent) -> None:
        for row, (name, length) in enumerate(zip(event.request_ids, event.lengths, strict=True)):
            if (recorder := recorders.get(name)) is not None:
                canvas, *flags = (
                    part[row, :length].numpy() for part in (event.canvas, event.committed, event.edited, event.remasked)
                )
                where, kinds = _changes(*flags)
                recorder.commit(event.step, where, canvas[where], kinds, length=length, canvas=canvas)

    return on_step


def _changes(commit: np.ndarray, edited: np.ndarray, remasked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a step did something, and what kind of thing it was."""
    where = (commit | edited | remasked).nonzero()[0]
    return where, np.where(remasked[where], MASK, np.where(edited[where], REPLACE, SET))


def finish(recorder: Recorder, seq: Sequence, result: Generation) -> None:
    """Hand the trace over; it is put together and written elsewhere."""
    recorder.finish(nfe=seq.nfe, finish_reason=result.finish_reason)


def _rule(seq: Sequence) -> str:
    from dlm.diffusion.unmask import RULES

    rule = seq.decoding.rule
    return next((name for name, known in RULES.items() if known is type(rule)), repr(rule))
