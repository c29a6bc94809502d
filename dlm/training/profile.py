"""Profiles a run: named ranges, a Chrome trace, a CUDA memory snapshot, and the machine's greatest speed."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function, schedule

from dlm.errors import UserError
from dlm.models.config import ModelConfig
from dlm.training.observing import ProfileConfig

OFF: AbstractContextManager = nullcontext()
WORDS: dict[str, dict[str, Any]] = {
    **{str(level): {"level": level} for level in range(4)},
    "trace": {"trace": True},
    "memory": {"memory": True},
}


class Ranges:
    """Named ranges of work down to a level: 1 a step's phases; 2 views, network, loss parts; 3 layers.

    A range beyond the level is one shared context manager that does nothing.
    """

    def __init__(self, level: int = 0) -> None:
        self.level = level

    def __call__(self, name: str, level: int = 1) -> AbstractContextManager:
        return _named(name) if level <= self.level else OFF

    def name_layers(self, layers: nn.ModuleList) -> None:
        """At level 3, a range around each layer's forward."""
        for number, layer in enumerate(layers if self.level >= 3 else ()):
            _name_forward(layer, f"layer {number}")


SILENT = Ranges()


def _name_forward(module: nn.Module, name: str) -> None:
    opened: list[AbstractContextManager] = []

    def enter(*_: object) -> None:
        opened.append(_named(name))
        opened[-1].__enter__()

    def leave(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """One range: in the traces of torch.profiler everywhere, and for Nsight (NVTX) where CUDA is in use."""
    with record_function(name), torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else OFF:
        yield


class Profile:
    """What [profile] and DLM_PROFILE ask for. `ranges` names work; `recording` writes files into <out>/profile."""

    def __init__(self, config: ProfileConfig, out: Path, rank: int, compiled: bool) -> None:
        self.config = config = with_environment(config, os.environ)
        if config.level == 3 and compiled:
            raise UserError("profile.level = 3 names layers, which train.compile fuses: take level 2 or drop that")
        self.ranges = Ranges(max(config.level, int(config.trace)))
        self.folder, self.suffix = out / "profile", f"-rank{rank}" if rank else ""
        self.say: Callable[[str], None] = print
        self.steps, self.at = 0, 0
        self._profiler: torch.profiler.profile | None = None
        self._snapshot = False

    @contextmanager
    def recording(self, say: Callable[[str], None]) -> Iterator[None]:
        """Record `active` steps after the first `wait` and `warmup` ones, or fewer if the run ends before."""
        c, self.say = self.config, say
        if c.trace or c.memory:
            self.folder.mkdir(parents=True, exist_ok=True)
        if c.memory and not torch.cuda.is_available():
            say("profile.memory: snapshots are of CUDA memory, and there is no CUDA device: none is taken")
        elif c.memory:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._snapshot = True
        if c.trace:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            steps = schedule(wait=c.wait, warmup=c.warmup, active=c.active, repeat=1)
            self._profiler = torch.profiler.profile(
                activities=kinds,
                schedule=steps,
                on_trace_ready=self._export,
                acc_events=True,  # there is one cycle; without this torch 2.11 warns of the others
            )
            self._profiler.start()
        try:
            yield
        finally:
            if self._profiler:
                self._profiler.stop()
                if self.steps <= c.wait + c.warmup:
                    early = f"in the {c.wait} + {c.warmup} before recording"
                    say(f"profile.trace: the run ended after {self.steps} steps, {early}")
            self._dump()

    def step(self, step: int) -> None:
        """After optimiser step `step`."""
        if self._profiler is None and not self._snapshot:
            return
        self.steps, self.at = self.steps + 1, step
        if self._profiler:
            self._profiler.step()
        if self.steps == self.config.wait + self.config.warmup + self.config.active:
            self._dump()

    def _export(self, profiler: torch.profiler.profile) -> None:
        file = self.folder / f"trace-step-{self.at:08d}{self.suffix}.json"
        profiler.export_chrome_trace(str(file))
        self.say(f"written: {file} (open it in https://ui.perfetto.dev)")

    def _dump(self) -> None:
        if not self._snapshot:
            return
        file = self.folder / f"memory-step-{self.at:08d}{self.suffix}.pickle"
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
        self._snapshot = False
        self.say(f"written: {file} (open it in https://pytorch.org/memory_viz)")


def with_environment(config: ProfileConfig, environment: Mapping[str, str]) -> ProfileConfig:
    """`config` and what DLM_PROFILE adds to it: 1, 2 or 3 for the level, `trace`, `memory`, joined by commas."""
    given = environment.get("DLM_PROFILE", "")
    found: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in given.split(","))):
        if word not in WORDS:
            raise UserError(f"DLM_PROFILE = {given!r}: {word!r} is none of {', '.join(WORDS)}")
        found |= WORDS[word]
    return config.model_copy(update=found)


def flops_a_token(
    config: ModelConfig,
    parameters: int,
    length: int,
    forwarded: float = 1.0,
    predicted: float = 0.5,
    block_length: int | None = None,
) -> float:
    """Training FLOPs a token of input: 6 a weight, attention's 12 * length * width a layer, the head at predicted positions only.

    Counted as in Kaplan et al. and nanoGPT, but the network runs on `forwarded` positions for each token and the vocabulary
    projection on `predicted` ones (see `Masking.work`). Of two streams with blocks of `block_length` the keys count that
    they see: length + block_length of both rows of a token together. Of a mixture of experts, only the experts a token
    meets count.
    """
    head = config.vocab_size * config.hidden_size
    body = parameters - head * (1 if config.tie_word_embeddings else 2)
    if config.position_embedding == "learned":
        body -= config.max_position_embeddings * config.hidden_size
    if config.moe is not None:
        m = config.moe
        idle = m.num_experts - m.num_experts_per_tok
        body -= 3 * config.hidden_size * m.intermediate_size * idle * (config.num_hidden_layers - m.first_k_dense)
    keys = forwarded * length if block_length is None else length + block_length
    attention = 12 * keys * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return forwarded * 6 * body + attention + 6 * head * predicted


def gemm_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product, measured now; MFU is a share of it."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)
