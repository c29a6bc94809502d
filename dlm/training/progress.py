"""What a run tells: a progress bar, metrics.jsonl, throughput and MFU. Knows nothing of how numbers come about."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dlm.models.config import ModelConfig


class Metrics:
    """metrics.jsonl: one JSON object a line; lines after the step resumed from are dropped."""

    def __init__(self, path: Path, after: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # the line a crash cut off
                    continue
                if row["step"] <= after:
                    kept.append(line)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        temporary.replace(path)
        self.path = path

    def write(self, **values: Any) -> None:
        """Append one line; the file is not kept open, so nothing is lost however the run ends."""
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


class Bar:
    """A progress bar with loss, bound, tokens/s and MFU on a terminal; a line now and then elsewhere."""

    def __init__(self, steps: int, done: int, shown: bool) -> None:
        self.console = Console(stderr=True)
        self.live = shown and self.console.is_terminal
        self.shown, self.last_line = shown, 0.0
        self.progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            disable=not self.live,
        )
        self.task = self.progress.add_task("", total=steps, completed=done, text="")

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, step: int, text: str) -> None:
        self.progress.update(self.task, completed=step, text=text)
        if self.shown and not self.live and time.monotonic() - self.last_line > 30:
            self.say(f"step {step}  {text}")
            self.last_line = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.shown:
            self.progress.print(text, markup=False, highlight=False) if self.live else print(text, file=sys.stderr, flush=True)


def flops_a_token(config: ModelConfig, parameters: int, length: int, masked: float = 0.5) -> float:
    """Training FLOPs a token of input: 6 a weight, attention's 12 * length * width a layer, the head where masked only.

    Counted as in Kaplan et al. and nanoGPT, except that the vocabulary projection runs on the `masked` share of
    positions alone. A mixture of experts counts the experts a token meets.
    """
    head = config.vocab_size * config.hidden_size
    body = parameters - head * (1 if config.tie_word_embeddings else 2)
    if config.position_embedding == "learned":
        body -= config.max_position_embeddings * config.hidden_size
    if config.moe is not None:
        m = config.moe
        idle = m.num_experts - m.num_experts_per_tok
        body -= 3 * config.hidden_size * m.intermediate_size * idle * (config.num_hidden_layers - m.first_k_dense)
    attention = 12 * length * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return 6 * body + 6 * head * masked + attention


def gemm_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that this machine reaches in a large matrix product, measured now: what MFU is a share of."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)
