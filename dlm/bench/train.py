"""[train]: a few steps of a training config, timed."""

import json
import tempfile
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from dlm.bench.config import BenchConfig, TrainBenchSection
from dlm.bench.finding import Finding, Say, Table

if TYPE_CHECKING:
    from dlm.training.config import TrainConfig

HEADINGS = {
    "config": "config",
    "parameters": "parameters",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU, %",
    "step_ms": "step, ms",
    "loss": "loss",
    "peak_memory_mib": "peak memory, MiB",
}


def measure(config: BenchConfig, say: Say) -> Finding:
    """Steps of `dlm-train` on the config's own data, without its validation and checkpoints."""
    import torch

    from dlm.bench.peak import Peak
    from dlm.training.loop import Run
    from dlm.training.throughput import gemm_ceiling

    s = config.train or TrainBenchSection()
    with tempfile.TemporaryDirectory() as folder:
        training = training_config(s, folder, config.threads)
        run = Run(training)
        try:
            device, t = run.accelerator.device, training.train
            ceiling = gemm_ceiling(device, torch.bfloat16 if t.precision == "bf16" else torch.float32)
            say(f"{s.config}: {run.parameters:,} parameters, GEMM ceiling {ceiling / 1e9:,.0f} GFLOP/s")
            times, parts = [], {}
            with Peak(device) as peak:
                for _ in range(s.warmup + s.steps):
                    started = time.perf_counter()
                    parts, _ = run.optimiser_step()  # returns numbers, so the device has finished
                    times.append(time.perf_counter() - started)
        finally:
            run.loader.close()
    seconds = median(times[s.warmup :])  # which another process's burst does not move
    speed = t.batch_size * t.length / seconds
    row = {
        "config": s.config,
        "parameters": run.parameters,
        "tokens_per_second": speed,
        "mfu": 100 * speed * run.flops_a_token / ceiling / run.accelerator.num_processes,
        "step_ms": 1000 * seconds,
        "loss": sum(parts.values()),
        "peak_memory_mib": peak.bytes / 2**20,
    }
    facts = {"batch_size": t.batch_size, "length": t.length, "precision": t.precision, "compile": t.compile}
    text = (
        f"{t.batch_size} × {t.length} tokens a step, {t.precision}; MFU is the share of {ceiling / 1e9:,.0f} GFLOP/s."
    )
    table = Table(title="Training", headings=HEADINGS, rows=[row], text=text)
    return Finding(values={"train": {**row, **facts, "gemm_ceiling": ceiling, "seconds": times}}, tables=[table])


def training_config(s: TrainBenchSection, folder: str, threads: int | None) -> "TrainConfig":
    """The config under test, writing nowhere and only training."""
    from dlm import config as toml
    from dlm.training.config import TrainConfig

    overrides: dict[str, Any] = {**s.overrides, "train.out": folder, "train.resume": False}
    overrides |= {"eval.sequences": 0, "eval.sample_every": 0, "checkpoint.every": 0, "log.progress": False}
    if threads is not None:
        overrides["train.threads"] = threads
    words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in overrides.items()}
    return toml.load(TrainConfig, [s.config], words)
