"""Each kernel against its roofline: the time its bytes and FLOPs need at the copy bandwidth and GEMM speed of the same run.

    python benchmarks/kernels.py                       # on a GPU: full shapes in bf16, and benchmarks/results/kernels-*.json
    python benchmarks/kernels.py --device cpu          # the twins at tiny shapes, and what a GPU would be held to
    python benchmarks/kernels.py --only attention      # cases whose name has that word

A case is timed over several sets of its tensors in turn, more than the caches hold; on a GPU as one CUDA graph, so that
launching costs nothing. Bytes are those that must move at least: every input once, every output once. Exit status 1: a goal was missed. It knows
no model.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm.kernels import reference
from dlm.kernels.dispatch import confidence, paged_attention, rms_norm, rope_write
from dlm.kernels.paths import computing_with, find
from dlm.kernels.spans import Spans

RESULTS = Path(__file__).parent / "results"
CACHED = {"cuda": 1 << 30, "cpu": 1 << 24}  # bytes a case must go through before it sees a tensor again
SHEETS = {
    "H200": (4.8e12, 989e12),
    "H100 SXM": (3.35e12, 989e12),
    "A100 80 GB": (2.04e12, 312e12),
}  # bytes/s, bf16 FLOP/s


@dataclass(frozen=True, kw_only=True)
class Attention:
    """b spans of `block` queries, the last of so many keys each; pages of 32 in no order."""

    batch: int
    context: int
    block: int
    heads: int
    kv_heads: int
    head_dim: int
    block_length: int | None = None
    page_size: int = 32

    def tiny(self) -> "Attention":
        group = self.heads // self.kv_heads
        shape = {"heads": 2 * group, "kv_heads": 2, "head_dim": 32, "block_length": self.block_length}
        return Attention(batch=min(self.batch, 3), context=128, block=min(self.block, 32), **shape)

    def work(self, size: int) -> tuple[int, int]:
        """Bytes and FLOPs."""
        seen = [min((x // b + 1) * b, self.context) if (b := self.block_length) else self.context for x in self.rows]
        values = 2 * max(seen) * self.kv_heads + 2 * self.block * self.heads
        return self.batch * values * self.head_dim * size, 4 * self.batch * sum(seen) * self.heads * self.head_dim

    @property
    def rows(self) -> range:
        return range(self.context - self.block, self.context)

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], Tensor]:
        tensors = self.tensors(device, dtype, seed)
        return lambda: paged_attention(*tensors)

    def tensors(
        self, device: torch.device, dtype: torch.dtype, seed: int
    ) -> tuple[Tensor, Tensor, Tensor, Spans, int | None]:
        each = -(-self.context // self.page_size)
        pages = list(range(self.batch * each))
        random.Random(seed).shuffle(pages)
        tables = [pages[i * each : (i + 1) * each] for i in range(self.batch)]
        spans = Spans.of([self.rows] * self.batch, [self.context] * self.batch, tables, device)
        pool = (len(pages), self.page_size, self.kv_heads, self.head_dim)
        k, v = (torch.randn(pool, device=device, dtype=dtype) for _ in range(2))
        q = torch.randn(self.batch * self.block, self.heads, self.head_dim, device=device, dtype=dtype)
        return q, k, v, spans, self.block_length

    def error(self, device: torch.device, dtype: torch.dtype) -> float:
        """Forward error against fp64 of the same call, of the largest value; at most two spans, on the CPU."""
        few = Attention(**{**vars(self), "batch": min(self.batch, 2), "context": min(self.context, 4096)})
        q, k, v, spans, block_length = few.tensors(device, dtype, seed=0)
        found = paged_attention(q, k, v, spans, block_length).double().cpu()
        there = {key: x.cpu() for key, x in vars(spans).items() if isinstance(x, Tensor)}
        host = Spans(**there, max_queries=spans.max_queries, max_visible=spans.max_visible)
        exact = reference.paged_attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), host, block_length)
        return float((found - exact).abs().max() / exact.abs().max())


@dataclass(frozen=True, kw_only=True)
class Write:
    """Rotate and write n rows."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int

    def tiny(self) -> "Write":
        return Write(rows=min(self.rows, 96), heads=2 * (self.heads // self.kv_heads), kv_heads=2, head_dim=32)

    def work(self, size: int) -> tuple[int, int]:
        values = 2 * self.heads + 4 * self.kv_heads + 2  # q, k, v in and out; cos and sin
        return self.rows * self.head_dim * values * size, 6 * self.rows * (self.heads + self.kv_heads) * self.head_dim

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], Tensor]:
        n, e = self.rows, self.head_dim
        qkv = torch.randn(n, self.heads + 2 * self.kv_heads, e, device=device, dtype=dtype)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        cos, sin = (torch.rand(n, e, device=device, dtype=dtype) for _ in range(2))
        keys, values = (torch.zeros(-(-n // 32), 32, self.kv_heads, e, device=device, dtype=dtype) for _ in range(2))
        slots = torch.randperm(n, device=device)
        return lambda: rope_write(q, k, v, cos, sin, keys, values, slots)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm of n rows with the residual added."""

    rows: int
    width: int

    def tiny(self) -> "Norm":
        return Norm(rows=min(self.rows, 96), width=256)

    def work(self, size: int) -> tuple[int, int]:
        return (4 * self.rows + 1) * self.width * size, 5 * self.rows * self.width

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
        x, residual = (torch.randn(self.rows, self.width, device=device, dtype=dtype) for _ in range(2))
        weight = torch.ones(self.width, device=device, dtype=dtype)
        return lambda: rms_norm(x, weight, 1e-6, residual)


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """One pass over the vocabulary for n rows."""

    rows: int
    vocabulary: int
    temperature: float = 0.0

    def tiny(self) -> "Confidence":
        return Confidence(rows=min(self.rows, 16), vocabulary=2048, temperature=self.temperature)

    def work(self, size: int) -> tuple[int, int]:
        return self.rows * self.vocabulary * size, 8 * self.rows * self.vocabulary

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], object]:
        logits = 4 * torch.randn(self.rows, self.vocabulary, device=device, dtype=dtype)
        row = torch.arange(self.rows, device=device)
        temperature = self.temperature
        return lambda: confidence(
            logits, mask_id=0, temperature=temperature, seed=row, sample=row, step=row, position=row
        )


Case = Attention | Write | Norm | Confidence
LLADA = {"heads": 32, "kv_heads": 32, "head_dim": 128}
SDAR = {"heads": 32, "kv_heads": 8, "head_dim": 128}
CASES: dict[str, tuple[Case, float | None]] = {  # the case, and the share of its roofline it is to reach
    "attention, LLaDA-8B, batch 64, context 4,096, block 32": (
        Attention(batch=64, context=4096, block=32, **LLADA),
        0.8,
    ),
    "attention, LLaDA-8B, batch 1, context 1,024, block 32": (
        Attention(batch=1, context=1024, block=32, **LLADA),
        None,
    ),
    "attention, SDAR-4B, batch 128, context 1,024, block 4": (
        Attention(batch=128, context=1024, block=4, **SDAR),
        None,
    ),
    "attention, SDAR-4B, batch 8, context 16,384, block 32": (
        Attention(batch=8, context=16384, block=32, **SDAR),
        None,
    ),
    "attention, LLaDA-8B, whole sequence of 4,096": (Attention(batch=1, context=4096, block=4096, **LLADA), None),
    "attention, SDAR-4B, prefill of 4,096, block-causal 32": (
        Attention(batch=1, context=4096, block=4096, block_length=32, **SDAR),
        None,
    ),
    "rope and write, LLaDA-8B, 2,048 rows": (Write(rows=2048, **LLADA), None),
    "rope and write, SDAR-4B, 512 rows": (Write(rows=512, **SDAR), None),
    "norm, 2,048 rows of 4,096": (Norm(rows=2048, width=4096), None),
    "confidence, 2,048 rows of LLaDA's vocabulary": (Confidence(rows=2048, vocabulary=126464), None),
    "confidence, 32 rows of LLaDA's vocabulary": (Confidence(rows=32, vocabulary=126464), None),
    "confidence, 2,048 rows, temperature 1": (Confidence(rows=2048, vocabulary=126464, temperature=1.0), None),
}


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    full = device.type == "cuda" and not options.tiny
    cases = {name: case for name, case in CASES.items() if options.only in name}
    if not cases:
        print(
            f"error: --only {options.only}: no case has that in its name; there are:",
            *CASES,
            sep="\n  ",
            file=sys.stderr,
        )
        return 2
    with torch.inference_mode(), computing_with(find(options.kernels, device, dtype)):
        copy, gemm = copy_bandwidth(device, options.seconds), gemm_speed(device, dtype, options.seconds)
        print(f"{_name(device)}, {options.dtype}: copy {copy / 1e9:,.1f} GB/s, GEMM {gemm / 1e12:,.2f} TFLOP/s\n")
        print(f"{'measured':56s} {'µs':>10s} {'roofline':>10s} {'reached':>8s} {'to reach':>8s} {'error':>8s}")
        results = [
            measure(
                name, case if full else case.tiny(), goal if full else None, device, dtype, copy, gemm, options.seconds
            )
            for name, (case, goal) in cases.items()
        ]
    if not full:
        print_rooflines(cases)
    report = {
        "machine": _machine(device),
        "commit": _commit(),
        "dtype": options.dtype,
        "scale": "full" if full else "tiny",
        "copy_bytes_per_second": copy,
        "gemm_flops": gemm,
        "results": results,
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"\nwritten: {options.output}")
    return 1 if any(result["to_reach"] and result["reached"] < result["to_reach"] for result in results) else 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    there = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--device", default=there, help=f"where to run ({there})")
    add("--dtype", help="dtype of all tensors (bfloat16 on a GPU, float32 on a CPU)")
    add("--kernels", default="auto", help="what computes: auto, triton, c or torch")
    add("--only", default="", metavar="WORDS", help="only cases with these words in their names")
    add("--tiny", action="store_true", help="tiny shapes on a GPU too")
    add("--seconds", type=float, help="time for each case (1 on a GPU, 0.1 on a CPU)")
    add("--output", type=Path, metavar="FILE", help="JSON file (on a GPU: benchmarks/results/kernels-NAME.json)")
    options = parser.parse_args(argv)
    on_gpu = torch.device(options.device).type == "cuda"
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    options.seconds = options.seconds or (1.0 if on_gpu else 0.1)
    if on_gpu and options.output is None and not options.tiny:
        name = torch.cuda.get_device_name().lower().replace(" ", "-")
        options.output = RESULTS / f"kernels-{name}.json"
    return options


def measure(
    name: str, case: Case, goal: float | None, device: torch.device, dtype: torch.dtype, copy: float, gemm: float, seconds: float
) -> dict[str, Any]:  # fmt: skip
    """Time one case and print its line."""
    moved, flops = case.work(dtype.itemsize)
    sets = max(1, min(64, -(-CACHED[device.type] // moved)))
    calls = [case.call(device, dtype, seed) for seed in range(sets)]
    taken = time_of(calls, device, seconds)
    roofline = max(moved / copy, flops / gemm)
    error = case.error(device, dtype) if isinstance(case, Attention) else None
    shown = f"{roofline * 1e6:10,.1f} {roofline / taken:8.0%} {f'{goal:.0%}' if goal else '':>8s}"
    print(f"{name:56s} {taken * 1e6:10,.1f} {shown} {'' if error is None else f'{error:.1e}':>8s}", flush=True)
    return {
        "case": name,
        "shape": {"kind": type(case).__name__, **vars(case)},
        "microseconds": taken * 1e6,
        "bytes": moved,
        "flops": flops,
        "roofline_microseconds": roofline * 1e6,
        "bound": "bytes" if moved / copy >= flops / gemm else "flops",
        "reached": roofline / taken,
        "to_reach": goal,
        "forward_error": error,
    }


def time_of(calls: Sequence[Callable[[], object]], device: torch.device, seconds: float) -> float:
    """Seconds a call: the median over rounds through all of them."""
    for call in calls[:2]:
        call()  # compiles
    if device.type != "cuda":
        times: list[float] = []
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            for call in calls:
                call()
            times.append((time.perf_counter() - start) / len(calls))
        return statistics.median(times)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _replay(graph, seconds) / len(calls)


def _replay(graph: "torch.cuda.CUDAGraph", seconds: float) -> float:
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes read and written a second by a copy larger than the caches."""
    size = 1 << (31 if device.type == "cuda" else 26)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * size / time_of([lambda: target.copy_(source)], device, seconds)


def gemm_speed(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of a large square product."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / time_of([lambda: a @ b], device, seconds)


def print_rooflines(cases: dict[str, tuple[Case, float | None]]) -> None:
    """What a GPU is held to, from data sheets where none was measured."""
    heads = "".join(f" {name:>12s}" for name in SHEETS)
    print(
        f"\n{'held to, full shapes in bfloat16: roofline, µs':56s} {'MB':>10s} {'GFLOP':>10s}{heads} {'to reach':>8s}"
    )
    for name, (case, goal) in cases.items():
        moved, flops = case.work(2)
        times = "".join(
            f" {max(moved / bandwidth, flops / speed) * 1e6:12,.1f}" for bandwidth, speed in SHEETS.values()
        )
        print(f"{name:56s} {moved / 1e6:10,.1f} {flops / 1e9:10,.1f}{times} {f'{goal:.0%}' if goal else '':>8s}")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"


def _machine(device: torch.device) -> dict[str, Any]:
    """Where the figures come from."""
    facts: dict[str, Any] = {"device": _name(device), "python": platform.python_version(), "torch": torch.__version__}
    try:
        facts["triton"] = version("triton")
    except PackageNotFoundError:
        facts["triton"] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "memory": properties.total_memory}
        facts["multiprocessors"] = properties.multi_processor_count
    return facts


def _commit() -> str | None:
    """The commit, with `-dirty` where the tree has changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or None


if __name__ == "__main__":
    raise SystemExit(main())
