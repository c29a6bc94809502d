"""`BatchRecorder`: what a denoising loop over a batch calls at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dlm.errors import UserError
from dlm.trace.record import Delivering, Recorder, plain


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
        """Deliver nothing."""
        for recorder in self.rows:
            recorder.drop()

    def _open(self, count: int) -> list[Recorder]:
        prompts = np.atleast_2d(plain(self.prompt))
        if len(prompts) not in (1, count):
            raise UserError(f"trace {self.request_id[:60]!r}: {len(prompts)} prompts for a batch of {count}")
        names = [self.request_id] if count == 1 else [f"{self.request_id}/{row}" for row in range(count)]
        return [self.make(name, prompts[row % len(prompts)]) for row, name in enumerate(names)]
