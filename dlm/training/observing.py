"""The sections for validation, checkpoints, logs, pictures and profiles. Must import without torch."""

import os
from typing import ClassVar, Literal

from pydantic import Field

from dlm.reading import Reader, Readers
from dlm.training.sections import Section


class EvalConfig(Section):
    """Validation by the likelihood bound, and printed samples."""

    READERS = dict.fromkeys(
        ("prompts", "gen_length"),
        Reader(decides="sample_every", where="with a sample_every above 0", reads=lambda e: e.sample_every > 0),
    )

    every: int = Field(default=250, ge=0, description="steps between validations; 0: only at the end")
    sequences: int = Field(default=64, ge=0, description="held-out sequences; 0: no validation")
    draws: int = Field(default=4, ge=1, description="Monte Carlo draws a sequence")
    batch_size: int = Field(default=16, ge=1, description="sequences a forward")
    sample_every: int = Field(default=0, ge=0, description="steps between printed samples; 0: none")
    prompts: tuple[str, ...] = Field(default=(), description="prompts of the samples; [MASK:n] marks holes")
    gen_length: int = Field(default=32, ge=1, description="tokens a sample without holes")


class CheckpointConfig(Section):
    """Exactly resumable checkpoints: weights, optimiser, schedule, EMA and the position in the data."""

    every: int = Field(default=500, ge=0, description="steps between checkpoints; 0: only when stopped by a signal")
    keep_last: int = Field(default=2, ge=1, description="older ones are deleted")


class LogConfig(Section):
    """Where numbers go. metrics.jsonl in the run folder is always written."""

    READERS: ClassVar[Readers] = {
        "project": Reader(decides="trackers", where="with trackers", reads=lambda log: bool(log.trackers))
    }

    every: int = Field(default=10, ge=1, description="steps between lines")
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = Field(
        default=(), description="accelerate's trackers to use as well"
    )
    project: str = Field(default="dlm", description="project name for the trackers")
    progress: bool = Field(default=True, description="progress bar on a terminal")


class WatchConfig(Section):
    """[watch]: what a run shows beside its loss. It changes none of the numbers that a run computes."""

    READERS: ClassVar[Readers] = {
        "pictures": Reader(decides="every", where="with an every above 0", reads=lambda w: w.every > 0)
    }

    every: int = Field(
        default=0,
        ge=0,
        description="steps between snapshots: gradient norm by group, loss by mask ratio, cosines, pictures, a sample; 0: none",
    )
    pictures: bool = Field(
        default=True,
        description="draw what is seen (needs the extra `plot`): for the trackers or, without any, into <out>/pictures",
    )
    epochs: bool = Field(
        default=False, description="at each end of an epoch of the data: its throughput, and the bound"
    )


class ProfileConfig(Section):
    """[profile]: where time and memory go. DLM_PROFILE=2,trace,memory in the environment says the same for one run."""

    READERS = dict.fromkeys(
        ("wait", "warmup", "active"),
        Reader(
            decides="trace",
            where="with trace, memory or DLM_PROFILE",
            reads=lambda p: p.trace or p.memory or "DLM_PROFILE" in os.environ,
        ),
    )

    level: int = Field(
        default=0,
        ge=0,
        le=3,
        description="named ranges (NVTX on a GPU): 1 phases of a step; 2 and views, network, loss; 3 and layers; 0 none",
    )
    trace: bool = Field(
        default=False, description="write a Chrome trace by torch.profiler into <out>/profile; names phases at least"
    )
    memory: bool = Field(default=False, description="write a CUDA memory snapshot into <out>/profile")
    wait: int = Field(default=5, ge=0, description="steps before the profiler's warm-up")
    warmup: int = Field(default=2, ge=0, description="steps of the profiler's warm-up, which are not in the trace")
    active: int = Field(default=3, ge=1, description="steps in the trace; the memory snapshot is taken after the last")
