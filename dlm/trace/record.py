"""Records a denoising loop step by step: `Recorder` for one request, `BatchRecorder` for a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dlm.errors import UserError
from dlm.trace.assemble import changes, from_events, from_map, mask_of, plain, row_of
from dlm.trace.events import GIVEN, MASK, NO_MASK, SET
from dlm.trace.facts import digest_of
from dlm.trace.trace import Trace

if TYPE_CHECKING:
    from numpy import ndarray

KEEP = ("tokens", "masks", "confidence", "topk", "digests")
"""What may be kept beside the tokens. Masks follow from the steps, so "masks" adds nothing."""
Deliver = Callable[["Recorder"], object]


class Delivering:
    """A context that delivers its trace at the end, and drops it after an error."""

    def finish(self) -> None:
        """Deliver, once."""

    def drop(self) -> None:
        """Deliver nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.drop()


class Recorder(Delivering):
    """Records one request.

    `prompt` is what stands at the start of the canvas, masks in its holes included; `length` is that of the first canvas,
    where masks follow. The engine calls `commit` with what changed, or `filled` once at the end; another loop calls `step`
    with its whole canvas. These calls only take notes; `trace()` builds the trace.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Any = (),
        *,
        mask_id: int | None = None,
        length: int | None = None,
        meta: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
        keep: Collection[str] = (),
        topk: int = 4,
        deliver: Deliver | None = None,
    ) -> None:
        self.request_id, self.mask_id = request_id, mask_id
        self.initial = row_of(prompt)
        self.meta, self.context = dict(meta or {}), dict(context or {})
        self.keep, self.topk = check_keep(keep), topk
        self.num_steps, self.length = 0, max(len(self.initial), length or 0)
        self.growth: list[tuple[int, int]] = [(GIVEN, self.length)]
        self._deliver, self._closed = deliver, False
        self._events: list[tuple[int, Any, Any, Any, Any, Any]] = []
        self._canvases: list[ndarray] = []  # until the mask is known
        self._map: tuple[Any, ...] | None = None
        self._digests: list[bytes] = []

    def commit(
        self,
        step: int,
        positions: Any,
        tokens: Any,
        kinds: Any = SET,
        confidence: Any = None,
        topk: tuple[Any, Any] | None = None,
        length: int | None = None,
        canvas: Any = None,
    ) -> None:
        """Note what one step, from 0, did; the arrays are kept as they are and must not be changed afterwards.

        `kinds` is one kind or one for each position. `topk` is tokens and logits, (n, k) each. Positions past the end
        of the canvas extend it with masks; `length` says how long it is where that is not enough. `canvas` is what the
        sampler holds after the step, of which "digests" keeps a digest.
        """
        end = length if length is not None else 1 + int(max(positions)) if len(positions) else 0
        if end > self.length:
            self.length = end
            self.growth.append((step, end))
        self.num_steps = max(self.num_steps, step + 1)
        if len(positions):
            self._events.append((step, positions, tokens, kinds, confidence, topk))
        if canvas is not None and "digests" in self.keep:
            self._digests.append(digest_of(row_of(canvas)))

    def filled(self, tokens: Any, steps: Any, num_steps: int | None = None, confidence: Any = None) -> None:
        """Note a whole request that was never revised: its final canvas, and each position's step (-1: given)."""
        self._map = (tokens, steps, num_steps, confidence)

    def step(self, canvas: Any) -> None:
        """Note the canvas after one more step: (l,) ids, or (1, l). torch or numpy, on any device."""
        after = row_of(canvas).copy()
        if "digests" in self.keep:
            self._digests.append(digest_of(after))
        if self.mask_id is None:
            self._canvases.append(after)
        else:
            self._compare(after)

    def trace(self) -> Trace:
        """The trace of what was noted."""
        facts: dict[str, Any] = {"own": self.meta, "context": self.context}
        if self._map is not None:
            tokens, steps, num_steps, confidence = self._map
            kept = "confidence" in self.keep and confidence is not None
            confidence = row_of(confidence, np.float16) if kept else None
            rows = (row_of(tokens), row_of(steps))
            return from_map(self.request_id, *rows, self.mask_id, num_steps, confidence, **facts)
        if self._canvases:
            mask = mask_of(self._canvases)  # what positions change from; none where there was one step only
            self.mask_id = None if mask < 0 else mask
            for canvas in self._canvases:
                self._compare(canvas)
            self._canvases = []
        return from_events(
            self.request_id,
            self.initial,
            self._columns(),
            mask_id=self.mask_id,
            num_steps=self.num_steps,
            growth=self.growth,
            confidence=self._beside(4, np.float16) if "confidence" in self.keep else None,
            topk=self._topk() if "topk" in self.keep else None,
            digests=b"".join(self._digests),
            **facts,
        )

    def finish(self, **meta: Any) -> None:
        """Deliver the trace, with further facts of this request; once."""
        if self._closed:
            return
        self._closed = True
        self.meta.update(meta)
        if self._deliver is not None:
            self._deliver(self)

    def drop(self) -> None:
        self._closed = True

    def _compare(self, after: ndarray) -> None:
        mask = NO_MASK if self.mask_id is None else self.mask_id
        if self.num_steps == 0:
            self._last = self.initial
            self.length = max(self.length, len(after))
            self.growth = [(GIVEN, self.length)]
        elif len(after) > self.length:
            self.length = len(after)
            self.growth.append((self.num_steps, self.length))
        missing = len(after) - len(self._last)
        before = np.concatenate((self._last, np.full(missing, mask, np.int32))) if missing > 0 else self._last
        step, position, kind, token = changes(self.num_steps, before, after, mask)
        if len(position):
            self._events.append((self.num_steps, position, token, kind, None, None))
        self._last = after
        self.num_steps += 1

    def _columns(self) -> ndarray:
        if not self._events:
            return np.zeros((4, 0), np.int32)
        steps, positions, tokens, kinds = zip(*(event[:4] for event in self._events), strict=True)
        sizes = [len(row) for row in positions]
        columns = np.empty((4, sum(sizes)), np.int32)
        columns[0], columns[1] = np.repeat(steps, sizes), np.concatenate(positions)
        if all(isinstance(kind, int) for kind in kinds):
            columns[2] = np.repeat(kinds, sizes)
        else:
            columns[2] = np.concatenate([np.broadcast_to(kind, size) for kind, size in zip(kinds, sizes, strict=True)])
        columns[3] = np.concatenate(tokens)
        columns[3, columns[2] == MASK] = NO_MASK if self.mask_id is None else self.mask_id
        return columns

    def _beside(self, field: int, kind: type) -> ndarray | None:
        """One value an event, such as its confidence; NaN for steps without."""
        if all(event[field] is None for event in self._events):
            return None
        parts = [
            np.full(len(event[1]), np.nan) if event[field] is None else np.asarray(event[field]).reshape(-1)
            for event in self._events
        ]
        return np.concatenate(parts).astype(kind)

    def _topk(self) -> tuple[ndarray, ndarray] | None:
        sizes = [np.shape(event[5][0])[1] for event in self._events if event[5] is not None]
        if not sizes:
            return None
        n, k, start = sum(len(event[1]) for event in self._events), max(sizes), 0
        tokens, logits = np.full((n, k), -1, np.int32), np.full((n, k), np.nan, np.float16)
        for event in self._events:
            end = start + len(event[1])
            if event[5] is not None:
                width = np.shape(event[5][0])[1]
                tokens[start:end, :width], logits[start:end, :width] = event[5]
            start = end
        return tokens, logits


class BatchRecorder(Delivering):
    """Records a batch: each row of a (b, l) canvas is a request of its own, called name/row (name for a batch of one)."""

    def __init__(self, make: Callable[[str, Any], Recorder], request_id: str, prompt: Any) -> None:
        self.make, self.request_id, self.prompt = make, request_id, prompt
        self.rows: list[Recorder] = []

    def step(self, canvas: Any) -> None:
        """Note the canvas after one more step: (l,) or (b, l) ids, torch or numpy."""
        rows = np.atleast_2d(plain(canvas))
        if not self.rows:
            self.rows = self._open(len(rows))
        if len(rows) != len(self.rows):
            raise UserError(f"trace {self.request_id[:60]!r}: a batch of {len(rows)} after one of {len(self.rows)}")
        for recorder, row in zip(self.rows, rows, strict=True):
            recorder.step(row)

    def finish(self, **meta: Any) -> None:
        """Deliver the traces, each with these further facts."""
        for recorder in self.rows or self._open(1):
            recorder.finish(**meta)

    def drop(self) -> None:
        for recorder in self.rows:
            recorder.drop()

    def _open(self, count: int) -> list[Recorder]:
        prompts = np.atleast_2d(plain(self.prompt))
        if len(prompts) not in (1, count):
            raise UserError(f"trace {self.request_id[:60]!r}: {len(prompts)} prompts for a batch of {count}")
        names = [self.request_id] if count == 1 else [f"{self.request_id}/{row}" for row in range(count)]
        return [self.make(name, prompts[row % len(prompts)]) for row, name in enumerate(names)]


def check_keep(keep: Collection[str]) -> Sequence[str]:
    """What is kept, as names; `"tokens+confidence"` is split. UserError for unknown names."""
    names = keep.split("+") if isinstance(keep, str) else list(keep)
    for name in names:
        if name not in KEEP:
            raise UserError(f"trace: cannot keep {name!r}; known: {', '.join(KEEP)}")
    return tuple(names)
