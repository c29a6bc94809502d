"""Each kernel against its roofline: the time its bytes and FLOPs need at the copy bandwidth and GEMM speed of the same run.

    python benchmarks/kernels.py                       # on a GPU: full shapes in bf16, and benchmarks/results/kernels-*.json
    python benchmarks/kernels.py --device cpu          # the twins at tiny shapes, and what a GPU would be held to
    python benchmarks/kernels.py --only attention      # cases whose name has that word

A case is timed over several sets of its tensors in turn, more than the caches hold; on a GPU as one CUDA graph, so that
launching costs nothing. Bytes are those that must move at least: every input once, every output once. Exit status 1: a goal was missed. It knows
no model.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import CASES, GOALS, Attention, Case, Mixture, Write, tiny
from measuring import RESULTS, machine, parser, write

from dlm.kernels.paths import PATHS, computing_with, find

CACHED = {"cuda": 1 << 30, "cpu": 1 << 24}  # bytes a case must go through before it sees a tensor again
SHEETS = {
    "H200": (4.8e12, 989e12),
    "H100 SXM": (3.35e12, 989e12),
    "A100 80 GB": (2.04e12, 312e12),
}  # bytes/s, bf16 FLOP/s


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    full = device.type == "cuda" and not options.tiny
    names = [name for name in CASES if options.only in name]
    if not names:
        known = "\n  ".join(CASES)
        print(f"error: --only {options.only}: no case has that in its name; there are:\n  {known}", file=sys.stderr)
        return 2
    with torch.inference_mode(), computing_with(find(options.kernels, device, dtype)):
        bench = Bench.on(device, dtype, options.seconds)
        name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
        speeds = f"copy {bench.copy / 1e9:,.1f} GB/s, GEMM {bench.gemm / 1e12:,.2f} TFLOP/s"
        print(f"{name}, {options.dtype}: {speeds}\n")
        print(
            f"{'measured':56s} {'µs':>10s} {'roofline':>10s} {'reached':>8s} {'to reach':>8s} {'error':>8s} {'torch, µs':>10s}"
        )
        if full:
            results = [bench.measure(name, CASES[name], GOALS.get(name)) for name in names]
        else:
            results = [bench.measure(name, tiny(CASES[name])) for name in names]
    if not full:
        print_rooflines(names)
    if options.output is not None:
        facts = {"machine": machine(options.device), "dtype": options.dtype, "scale": "full" if full else "tiny"}
        speeds = {"copy_bytes_per_second": bench.copy, "gemm_flops": bench.gemm}
        write(options.output, {**facts, **speeds, "results": results})
    return 1 if any(result["to_reach"] and result["reached"] < result["to_reach"] for result in results) else 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    there = "cuda" if torch.cuda.is_available() else "cpu"
    add = words.add_argument
    add("--device", default=there, help=f"where to run ({there})")
    add("--dtype", help="dtype of all tensors (bfloat16 on a GPU, float32 on a CPU)")
    add("--kernels", default="auto", help="what computes: auto, triton, c or torch")
    add("--only", default="", metavar="WORDS", help="only cases with these words in their names")
    add("--tiny", action="store_true", help="tiny shapes on a GPU too")
    add("--seconds", type=float, help="time for each case (1 on a GPU, 0.1 on a CPU)")
    add("--output", type=Path, metavar="FILE", help="JSON file (on a GPU: benchmarks/results/kernels-NAME.json)")
    options = words.parse_args(argv)
    on_gpu = torch.device(options.device).type == "cuda"
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    options.seconds = options.seconds or (1.0 if on_gpu else 0.1)
    if on_gpu and options.output is None and not options.tiny:
        name = torch.cuda.get_device_name().lower().replace(" ", "-")
        options.output = RESULTS / f"kernels-{name}.json"
    return options


@dataclass(frozen=True)
class Bench:
    """Where cases are timed, and how fast that copies (bytes/s, read and written) and multiplies (FLOP/s)."""

    device: torch.device
    dtype: torch.dtype
    seconds: float
    copy: float
    gemm: float

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, seconds: float) -> "Bench":
        return cls(device, dtype, seconds, copy_bandwidth(device, seconds), gemm_speed(device, dtype, seconds))

    def measure(self, name: str, case: Case, goal: float | None = None) -> dict[str, Any]:
        """Time one case and print its line."""
        moved, flops = case.work(self.dtype.itemsize)
        sets = max(1, min(64, -(-CACHED[self.device.type] // moved)))
        taken = time_of([case.call(self.device, self.dtype, seed) for seed in range(sets)], self.device, self.seconds)
        roofline = max(moved / self.copy, flops / self.gemm)
        error = case.error(self.device, self.dtype) if isinstance(case, Attention) else None
        twin = self.twin(case, sets)
        shares = f"{roofline * 1e6:10,.1f} {roofline / taken:8.0%} {_percent(goal)}"
        print(
            f"{name:56s} {taken * 1e6:10,.1f} {shares} {'' if error is None else f'{error:.1e}':>8s} "
            f"{'' if twin is None else f'{twin * 1e6:10,.1f}':>10s}",
            flush=True,
        )
        return {
            "case": name,
            "shape": {"kind": type(case).__name__, **vars(case)},
            "microseconds": taken * 1e6,
            "bytes": moved,
            "flops": flops,
            "roofline_microseconds": roofline * 1e6,
            "bound": "bytes" if moved / self.copy >= flops / self.gemm else "flops",
            "reached": roofline / taken,
            "to_reach": goal,
            "forward_error": error,
            "twin_microseconds": None if twin is None else twin * 1e6,
        }

    def twin(self, case: Case, sets: int) -> float | None:
        """Seconds of the same by torch's own operations; None on a CPU, and where these wait for the device."""
        waits = isinstance(case, Attention | Write) or (isinstance(case, Mixture) and self.dtype != torch.bfloat16)
        if self.device.type != "cuda" or waits:
            return None
        with computing_with(PATHS["torch"]):
            return time_of(
                [case.call(self.device, self.dtype, seed) for seed in range(sets)], self.device, self.seconds
            )


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


def print_rooflines(names: Iterable[str]) -> None:
    """What a GPU is held to, from data sheets where none was measured."""
    heads = "".join(f" {name:>12s}" for name in SHEETS)
    print(
        f"\n{'held to, full shapes in bfloat16: roofline, µs':56s} {'MB':>10s} {'GFLOP':>10s}{heads} {'to reach':>8s}"
    )
    for name in names:
        moved, flops = CASES[name].work(2)
        times = "".join(f" {max(moved / copy, flops / gemm) * 1e6:12,.1f}" for copy, gemm in SHEETS.values())
        print(f"{name:56s} {moved / 1e6:10,.1f} {flops / 1e9:10,.1f}{times} {_percent(GOALS.get(name))}")


def _percent(goal: float | None) -> str:
    return f"{goal:.0%}".rjust(8) if goal else " " * 8


if __name__ == "__main__":
    raise SystemExit(main())
