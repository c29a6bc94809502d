"""What this CPU's multiplying instructions reach at most, what our products reach of it, and what of a decode they are.

    python benchmarks/peaks.py                 # both shapes of cpu.py, one thread
    python benchmarks/peaks.py --shape small

One process, one thread, CPU time, the best of `--rounds`. The first table is of single instructions on registers (peaks.c; x86
alone); the second of all products of a forward, of a block's 32 rows and of a prompt's; the third takes a decode with a dual
cache apart: its products alone, all else, and how long it would take if its products ran at the peak of their instruction.
"""

import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import cpu
import torch
from measuring import RESULTS, Job, in_turns, machine, parser, write

import dlm
from dlm.inference.fused import FrozenLayers, frozen_layers
from dlm.kernels.c import binding, products
from dlm.kernels.c.compiler import compiler, run
from dlm.kernels.c.structs import Product
from dlm.models.fingerprint import weights_state
from dlm.models.subnormals import subnormals_as_zeros

INSTRUCTIONS: dict[str, tuple[str, str, int]] = {
    "fp32_256": ("vfmadd231ps ymm", "avx2", 8), "fp32_512": ("vfmadd231ps zmm", "avx512f", 16),
    "bf16_512": ("vdpbf16ps zmm", "avx512_bf16", 32), "int16_512": ("vpdpwssd zmm", "avx512_vnni", 32),
    "int8_512": ("vpdpbusd zmm", "avx512_vnni", 64), "fp16_512": ("vfmadd231ph zmm", "avx512_fp16", 32),
}  # fmt: skip
"""Function of peaks.c -> the instruction, the processor's flag for it, and how many products it sums."""
USED = {
    "float32": "fp32_512",
    "bf16-widened": "fp32_512",
    "bf16-dots": "bf16_512",
    "int16-dots": "int16_512",
    "int8-dots": "int8_512",
}
"""Kind of product -> what multiplies in it, where vectors have 512 bits."""
WAYS = {
    "fp32": ("float32", "c"), "bf16": ("bf16-widened", "c-widened"), "bf16 dots": ("bf16-dots", "c-dots"),
    "bf16 int16": ("int16-dots", "c-int16"), "q8": ("int8-dots", "c"),
}  # fmt: skip
"""Name -> the kind of product, and what an engine calls it."""
PROMPT, BLOCK = 300, 32
LENGTHS = {"small": 128, "large": 64}
"""Tokens that a decode of each shape writes."""
TIMES = 100_000


@subnormals_as_zeros()
def main() -> int:
    words = parser(__doc__)
    words.add_argument("--shape", choices=cpu.SHAPES, action="append", help="one alone (both)")
    words.add_argument("--rounds", type=int, default=5, help="of each measurement (5)")
    words.add_argument("--output", type=Path, default=RESULTS / "cpu-peaks.json", help="the JSON file")
    options = words.parse_args()
    torch.set_num_threads(1)
    peaks = _peaks(options.rounds)
    report: dict[str, Any] = {"machine": machine() | {"kernels": binding.library()[1]}, "peaks": peaks, "shapes": {}}
    for name in options.shape or cpu.SHAPES:
        report["shapes"][name] = _shape(name, {key: found["GFLOP/s"] for key, found in peaks.items()}, options.rounds)
    print(json.dumps(report, indent=1))
    write(options.output, report)
    return 0


def best(job: Callable[[], object], rounds: int) -> float:
    """The least CPU seconds of a call, after one more that fills caches."""
    taken = []
    for _ in range(rounds + 1):
        before = time.process_time()
        job()
        taken.append(time.process_time() - before)
    return min(taken[1:])


def _peaks(rounds: int) -> dict[str, dict[str, float]]:
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/peaks.so"
        run([*compiler(), "-O2", "-fPIC", "-shared", str(Path(__file__).with_suffix(".c")), "-o", made], 60)
        library = ctypes.CDLL(made)
    found = {}
    for name, (instruction, flag, summed) in INSTRUCTIONS.items():
        if flag in flags:
            seconds = best(lambda name=name: getattr(library, name)(ctypes.c_long(TIMES)), 4 * rounds)
            rate = 12 * TIMES / seconds / 1e9
            found[name] = {"instruction": instruction, "G/s": round(rate, 2), "GFLOP/s": round(2 * summed * rate)}
    return found


def _shape(name: str, peaks: dict[str, float], rounds: int) -> dict[str, Any]:
    lm, length = cpu.model(cpu.SHAPES[name]), LENGTHS[name]
    ways = {way: facts for way, facts in WAYS.items() if products.multiplies(facts[0])}
    prompt = torch.randint(0, 1000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = {"gen_length": length, "block_length": BLOCK, "steps": length, "cache": "dual"}
    jobs: dict[str, Job] = {}
    frozen: dict[str, FrozenLayers] = {}
    for way, (kind, kernels) in ways.items():
        which = lm if way == "fp32" else cpu.narrowed(lm, quantised=kind == "int8-dots")
        jobs[f"{way}, decode"] = partial(dlm.generate, which, [prompt], kernels=kernels, **asked)
        found = frozen_layers(which.network, weights_state(which.network), kernels.partition("-")[2] or None)
        assert found is not None
        frozen[way] = found
        for rows, times in ((BLOCK, 8), (PROMPT + length, 1)):
            jobs[f"{way}, {rows}"] = partial(multiplied, found, rows, times)
    taken = {job: min(seconds) for job, seconds in in_turns(jobs, rounds)[0]["cpu"].items()}
    base = taken["fp32, decode"]
    return {way: _row(way, frozen[way], length, taken, peaks.get(USED[kind]), base) for way, (kind, _) in ways.items()}


def _row(
    way: str, frozen: FrozenLayers, length: int, taken: dict[str, float], peak: float | None, base: float
) -> dict[str, Any]:
    """One way to multiply: its products alone, and in a decode of `length` tokens, one a step. `base` is fp32's decode."""
    decode, alone, sums, found = taken[f"{way}, decode"], 0.0, 0.0, {}
    for rows, per, times in ((BLOCK, 8, length - length // BLOCK), (PROMPT + length, 1, length // BLOCK)):
        seconds = taken[f"{way}, {rows}"] / per
        speed = flops(frozen, rows) / seconds / 1e9
        found[f"{rows} rows"] = f"{speed:.0f} GFLOP/s" + (f", {speed / peak:.0%} of the peak" if peak else "")
        alone += times * seconds
        sums += times * flops(frozen, rows)
    found |= {"decode ms": decode * 1e3, "products ms": alone * 1e3, "all else ms": (decode - alone) * 1e3}
    found["of fp32"] = decode / base
    if peak:
        least = decode - alone + sums / peak / 1e9
        found |= {"at the peak ms": least * 1e3, "at the peak of fp32": least / base}
    return found


def _matrices(frozen: FrozenLayers, rows: int) -> list[tuple[Product, int]]:
    """The products of a forward, and of how many rows: in the last layer and the head of half a block, the average of its masks."""
    found = []
    for number, layer in enumerate(frozen.layers, start=1):
        last = BLOCK // 2 if number == len(frozen.layers) else rows
        found += [(part, rows) for part in layer.qkv if part.n]
        found += [(part, last) for part in (layer.o, layer.gate, layer.up, layer.down)]
    return [*found, (frozen.head, BLOCK // 2)]


def multiplied(frozen: FrozenLayers, rows: int, times: int) -> None:
    """Nothing but the products of forwards of so many rows."""
    for part, count in _matrices(frozen, rows) * times:
        products.linear(part, _input(count, part.k))


def flops(frozen: FrozenLayers, rows: int) -> float:
    return sum(2.0 * part.n * part.k * count for part, count in _matrices(frozen, rows))


@cache
def _input(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width)


if __name__ == "__main__":
    raise SystemExit(main())
