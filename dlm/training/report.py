"""Reports a run while it runs: metrics.jsonl, a progress bar and trackers."""

import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dlm.atomic import write_text
from dlm.diffusion.bound import Estimate, with_error
from dlm.fields import flat
from dlm.training.config import TrainConfig
from dlm.training.folder import writing
from dlm.training.pictures import pixels, save
from dlm.training.profile import gemm_ceiling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGE_OPTIONS = {"tensorboard": {"dataformats": "NHWC"}}  # for images of shape (1, height, width, 3)
EVERY_SECONDS = 30.0  # between lines where there is no terminal for a bar


class Metrics:
    """metrics.jsonl: one JSON object a line; lines after the step resumed from are dropped."""

    def __init__(self, path: Path, after: int) -> None:
        self.path = path
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
            write_text(path, "".join(line + "\n" for line in lines if _step(line) <= after))

    def write(self, **values: Any) -> None:
        """Append one line; the file is not kept open, so nothing is lost however the run ends."""
        with writing(self.path.parent), self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def _step(line: str) -> float:
    """The step of a line of metrics.jsonl; infinite for half a line or a foreign one, which is so dropped."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


class Report:
    """Prints and logs a run's progress; silent in every process but the first."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, flops_a_token: float, step: int) -> None:
        self.config, self.accelerator, self.flops = config, accelerator, flops_a_token
        self.speaks = accelerator.is_main_process
        self.shown = self.speaks and config.log.progress
        self.metrics = Metrics(Path(config.train.out) / "metrics.jsonl", step) if self.speaks else None
        kind = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        self.measure_ceiling = partial(gemm_ceiling, accelerator.device, kind)
        self.ceiling = self.measure_ceiling()
        self.steps, self.spent = 0, 0.0  # since the last line
        self.bound, self.last_line = "", 0.0
        console = Console(stderr=True)
        self.live = self.shown and console.is_terminal
        self.bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not self.live,
        )
        self.task = self.bar.add_task("", total=config.train.steps, completed=step, text="")

    def __enter__(self) -> Self:
        if self.config.log.trackers:
            settings = flat(self.config.model_dump(mode="json"))
            plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.items()}
            self.accelerator.init_trackers(self.config.log.project, config=plain)
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.config.log.trackers:
            self.accelerator.end_training()

    def say(self, text: str) -> None:
        if self.live:
            self.bar.print(text, markup=False, highlight=False)
        elif self.shown:
            print(text, file=sys.stderr, flush=True)

    def begin(self, parameters: int) -> None:
        """The first line: the model's size and the machine's speed."""
        on_cpu = self.accelerator.device.type == "cpu"
        threads = f" on {torch.get_num_threads()} CPU thread(s)" if on_cpu else ""
        ceiling = f"GEMM ceiling {self.ceiling / 1e9:.0f} GFLOP/s{threads}"
        self.say(f"{parameters:,} parameters, {ceiling}, {self.config.train.steps} steps")

    def training(
        self, step: int, parts: dict[str, float], norm: float, lr: float, tokens: int, seconds: float, total: float
    ) -> None:
        """One optimiser step that took `seconds`, `total` since the run's beginning; the loss is the sum of its parts."""
        c, loss = self.config, sum(parts.values())
        self.steps, self.spent = self.steps + 1, self.spent + seconds
        self.bar.update(self.task, completed=step)
        if step % c.log.every and step != c.train.steps:
            return
        speed = self.steps * c.train.batch_size * c.train.length / self.spent
        self.steps, self.spent = 0, 0.0
        needed = speed * self.flops / self.accelerator.num_processes
        if needed > self.ceiling:  # other work slowed the machine when it was measured
            self.ceiling = max(self.ceiling, self.measure_ceiling())
        mfu = needed / self.ceiling
        text = f"loss {loss:.3f}  {self.bound}{speed:,.0f} tok/s  MFU {mfu:.0%}"
        self.bar.update(self.task, completed=step, text=text)
        if not self.live and time.monotonic() - self.last_line > EVERY_SECONDS:
            self.say(f"step {step}  {text}")
            self.last_line = time.monotonic()
        rates = {"tokens_per_second": round(speed, 1), "mfu": round(mfu, 4)}
        several = {f"loss/{name}": part for name, part in parts.items()} if len(parts) > 1 else {}
        row = {"loss": loss, **several, "grad_norm": norm, "lr": lr, "tokens": tokens}
        self._write(step, row | rates | {"seconds": round(total, 2)})

    def validation(self, step: int, tokens: int, found: Estimate) -> None:
        """The bound of the held-out sequences."""
        row: dict[str, float | None] = {"bound": found.per_token[0], "bound_error": found.per_token[1]}
        text = f"{with_error(*found.per_token, '.4f')} nats/token"
        if found.bits_per_byte is not None:
            row |= {"bits_per_byte": found.bits_per_byte[0], "bits_per_byte_error": found.bits_per_byte[1]}
            text += f", {with_error(*found.bits_per_byte, '.4f')} bits/byte"
        self.bound = f"bound {row['bound']:.3f}  "
        self.say(f"step {step}: held-out bound {text}")
        self._write(step, {"tokens": tokens, **row})

    def figures(self, step: int, tokens: int, row: dict[str, float], text: str) -> None:
        """The model's other figures of the held-out sequences."""
        self.say(f"step {step}: {text}")
        self._write(step, {"tokens": tokens, **row})

    def watched(self, step: int, row: dict[str, float | str], figures: dict[str, "Figure"]) -> None:
        """A snapshot's numbers; its pictures go to the trackers or, without any, into the run folder."""
        self._write(step, row)
        for name, figure in figures.items():
            for tracker in self.accelerator.trackers:
                options = IMAGE_OPTIONS.get(tracker.name, {})
                tracker.log_images({f"watch/{name}": pixels(figure)[None]}, step=step, **options)
            if not self.config.log.trackers:
                with writing(Path(self.config.train.out)):
                    save(figure, Path(self.config.train.out) / "pictures" / f"step-{step:08d}-{name}.png")

    def epoch(self, step: int, figures: dict[str, Any], bound: tuple[float, float | None] | None) -> None:
        """An epoch of the data that ended with this step, and the bound at its end where it was measured."""
        row = figures | ({} if bound is None else {"epoch_bound": bound[0]})
        text = "epoch {epoch}: {epoch_tokens:,} tokens, {epoch_tokens_per_second:,.0f} tok/s".format(**row)
        self.say(f"step {step}: {text}" + ("" if bound is None else f", bound {bound[0]:.4f} nats/token"))
        self._write(step, row)

    def _write(self, step: int, row: Mapping[str, float | str | None]) -> None:
        if self.metrics:
            self.metrics.write(step=step, **row)
        if self.config.log.trackers:
            self.accelerator.log({key: value for key, value in row.items() if value is not None}, step=step)
