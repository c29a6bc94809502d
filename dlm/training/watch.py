"""[watch]: a snapshot of the run every few steps, and figures of each epoch."""

from importlib.util import find_spec
from typing import Any

import torch

from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.optim import parameter_groups
from dlm.training.processes import whole
from dlm.training.report import Report
from dlm.training.trainable import Trainable
from dlm.training.validate import HeldOut

ROWS = 16  # of a batch, in a snapshot


class Watch:
    """Every [watch].every steps: `measure` inside the step, before gradients are clipped, and `snapshot` after it."""

    def __init__(self, config: TrainConfig, held_out: HeldOut | None) -> None:
        self.config, self.every, self.pictures = config, config.watch.every, config.watch.pictures
        self.row = None if held_out is None else (held_out.batches[0][0][0], held_out.batches[0][1][0])
        self.numbers: dict[str, float] = {}
        self.batch: Batch | None = None

    def due(self, step: int) -> bool:
        """Whether optimiser step `step` gets a snapshot."""
        return self.every > 0 and step % self.every == 0

    def measure(self, model: Trainable, batch: Batch) -> None:
        """Keep the step's gradient norms and the model's own numbers; every process has to call this."""
        self.numbers = {f"grad_norm/{name}": norm for name, norm in gradient_norms(model).items()} | model.numbers()
        self.batch = batch.rows(0, min(ROWS, self.config.train.micro_batch_size or ROWS))

    def snapshot(self, model: Trainable, report: Report, step: int) -> None:
        """Log numbers and pictures of the model after `step`."""
        assert self.batch is not None
        if self.pictures and find_spec("matplotlib") is None:
            report.say("watch.pictures needs matplotlib: pip install 'dlm[plot]'; numbers are logged without it")
            self.pictures = False
        row, figures = model.snapshot(self.batch, self.row, step, self.pictures)
        report.watched(step, self.numbers | row, figures)


def gradient_norms(model: Trainable) -> dict[str, float]:
    """The norm of each optimiser group's gradients."""
    norms = {}
    for name, parameters in parameter_groups(model.network, model.matrices()).items():
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            norms[name] = whole(torch.nn.utils.get_total_norm(gradients)).item()
    return norms


class Epochs:
    """Notices the end of an epoch of the data; its counters of the current epoch are part of a checkpoint."""

    def __init__(self, watched: bool) -> None:
        self.watched = watched
        self.epoch, self.tokens, self.seconds = 0, 0, 0.0

    def ended(self, epoch: int | None, tokens: int, seconds: float) -> dict[str, Any]:
        """The figures of the epoch that ended with this step, from totals of the run; empty when none did."""
        if not self.watched or epoch is None or epoch == self.epoch:
            return {}
        tokens_of, seconds_of = tokens - self.tokens, seconds - self.seconds
        figures = {"epoch": epoch, "epoch_tokens": tokens_of, "epoch_seconds": round(seconds_of, 2)}
        self.epoch, self.tokens, self.seconds = epoch, tokens, seconds
        return {**figures, "epoch_tokens_per_second": round(tokens_of / max(seconds_of, 1e-9), 1)}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.tokens, self.seconds = state["epoch"], state["tokens"], state["seconds"]
