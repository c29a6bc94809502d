"""Every kernel, compiled by the launchers themselves for every chip we claim, without a GPU.

The launches are real up to the point where the binary would run: a driver that only names a target stands in for the GPU.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm.kernels import Spans

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dlm[gpu]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("under TRITON_INTERPRET=1 nothing is compiled", allow_module_level=True)

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dlm.kernels import attention, chips, experts, gate, grouped, norm, pick, rope
from dlm.kernels.routing import Routing
from tests.inference.fake_gpu import LAUNCHES
from tests.refusals import refused

H200 = chips.Chip(132, 232448, 9)
CHIPS = {  # target, what the launchers ask a chip, the binary's name
    "sm_80": (GPUTarget("cuda", 80, 32), chips.Chip(108, 166912, 8), "cubin"),
    "sm_90": (GPUTarget("cuda", 90, 32), H200, "cubin"),
    "sm_100": (GPUTarget("cuda", 100, 32), chips.Chip(148, 232448, 10), "cubin"),
    "sm_120": (GPUTarget("cuda", 120, 32), chips.Chip(188, 101376, 12), "cubin"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), chips.Chip(304, 65536, 0), "hsaco"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), chips.Chip(256, 163840, 0), "hsaco"),
}
HEAD_DIMS = (64, 80, 96, 128, 256)


class Named:
    """A driver without a GPU. Devices are numbered apart, since Triton keeps what it compiled by device."""

    def __init__(self, name: str) -> None:
        self.number, self.target = 1000 + list(CHIPS).index(name), CHIPS[name][0]

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], list]:
    """`compiled(chip, call)`: the binaries of all launches that the call makes."""
    binaries = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        binaries.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    monkeypatch.setattr(JITFunction, "run", compile_only)

    def compile_for(name: str, call: Callable[[], object]) -> list:
        monkeypatch.setattr(driver, "_active", Named(name))
        monkeypatch.setattr(chips.Chip, "of", lambda _: CHIPS[name][1])
        binaries.clear()
        call()
        _, chip, kind = CHIPS[name]
        assert binaries and all(len(binary.asm[kind]) > 0 for binary in binaries)
        assert all(binary.metadata.shared <= chip.shared_memory for binary in binaries)
        return list(binaries)

    return compile_for


def attend(dtype: torch.dtype, head_dim: int, *, block_length: int | None, split: bool, group: int = 4) -> None:
    """A block of 32 against a context of 1,024, as LLaDA and SDAR have them."""
    g, page_size = 8, 32
    spans = Spans.of([range(992, 1024)], [1024], [range(32)])
    q = torch.zeros(32, g * group, head_dim, dtype=dtype)
    k, v = (torch.zeros(32, page_size, g, head_dim, dtype=dtype) for _ in range(2))
    attention.paged_attention(q, k, v, spans, block_length, split=split)


def write(dtype: torch.dtype, head_dim: int, rotated: int, normed: bool = False) -> None:
    q, k = torch.zeros(32, 32, head_dim, dtype=dtype), torch.zeros(32, 8, head_dim, dtype=dtype)
    pages = torch.zeros(4, 16, 8, head_dim, dtype=dtype)
    angle = torch.zeros(32, rotated, dtype=dtype) if rotated else None
    norms = (torch.zeros(head_dim, dtype=dtype),) * 2 if normed else (None, None)
    rope.rope_write(q, k, k, angle, angle, pages, pages, torch.arange(32), *norms, 1e-6)


def normalise(dtype: torch.dtype, width: int, added: bool) -> None:
    x = torch.zeros(32, width, dtype=dtype)
    norm.rms_norm(x, torch.zeros(width, dtype=dtype), 1e-6, x if added else None)


def survey(dtype: torch.dtype, temperature: float, keep_mask: bool) -> None:
    one = torch.zeros(4, dtype=torch.int64)
    address = {"seed": one, "sample": one, "step": one, "position": one}
    pick.confidence(
        torch.zeros(4, 126464, dtype=dtype), mask_id=126336, keep_mask=keep_mask, temperature=temperature, **address
    )


@pytest.mark.parametrize("chip", CHIPS)
def test_a_block_decode_compiles(chip, compiled):
    assert len(compiled(chip, lambda: attend(torch.bfloat16, 128, block_length=None, split=True))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_compiles(chip, dtype, head_dim, compiled):
    split = head_dim in (64, 96)
    compiled(chip, lambda: attend(dtype, head_dim, block_length=32 if split else None, split=split))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_everything_compiles_in_half_precision(chip, compiled):
    half = torch.float16
    compiled(chip, lambda: attend(half, 128, block_length=1, split=True))
    compiled(chip, lambda: write(half, 128, 128))
    compiled(chip, lambda: normalise(half, 2560, False))
    compiled(chip, lambda: survey(half, 1.0, False))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_the_other_kernels_compile(chip, compiled):
    for head_dim in HEAD_DIMS:
        compiled(chip, lambda head_dim=head_dim: write(torch.bfloat16, head_dim, head_dim))
    compiled(chip, lambda: write(torch.float32, 128, 64))
    compiled(chip, lambda: write(torch.bfloat16, 80, 0))
    for dtype, width in ((torch.bfloat16, 128), (torch.float32, 2560), (torch.bfloat16, 8192)):
        compiled(chip, lambda dtype=dtype, width=width: normalise(dtype, width, True))
    compiled(chip, lambda: survey(torch.bfloat16, 1.0, True))
    compiled(chip, lambda: survey(torch.float32, 0.0, True))
    compiled(chip, lambda: mix(torch.float32))
    compiled(chip, lambda: write(torch.float32, 128, 64, normed=True))


HALF = torch.bfloat16


def route() -> None:
    routing = Routing(chosen=8, sigmoid=True, normalised=True, factor=2.5, groups=8, kept_groups=4)
    experts.route(torch.zeros(32, 2048, dtype=HALF), torch.zeros(256, 2048, dtype=HALF), torch.zeros(256), routing)


def mix(dtype: torch.dtype) -> None:
    """LLaDA2-mini's, but for the number of experts: no kernel's binary depends on it."""
    x, chosen = torch.zeros(32, 2048, dtype=dtype), torch.zeros(32, 8, dtype=torch.int32)
    weights = torch.zeros(2, 1024, 2048, dtype=dtype), torch.zeros(2, 2048, 512, dtype=dtype)
    experts.mixture(x, chosen, chosen.float(), *weights, x)


STEP: dict[str, Callable[[], object]] = {
    "attention": lambda: attend(HALF, 128, block_length=32, split=False),
    "attention, cut": lambda: attend(HALF, 128, block_length=32, split=True),
    "norm, rotation and write": lambda: write(HALF, 128, 128, normed=True),
    "norm of a sum": lambda: normalise(HALF, 4096, True),
    "gate": lambda: gate.gated(torch.zeros(32, 24576, dtype=HALF)),
    "gate and up": lambda: grouped.gated_product(
        torch.zeros(32, 4096, dtype=HALF), torch.zeros(24576, 4096, dtype=HALF)
    ),
    "route": lambda: route(),
    "mixture": lambda: mix(HALF),
    "confidence": lambda: survey(HALF, 0.0, True),
    "confidence, drawn": lambda: survey(HALF, 1.0, True),
}
"""A step's kernels at the shapes of 8 B models."""


@dataclass(frozen=True)
class Built:
    """What a binary takes of its chip."""

    kernel: str
    registers: int
    """A thread's."""
    spilled: int
    """Bytes a thread that do not fit."""
    shared: int
    """Bytes a program."""

    @classmethod
    def of(cls, binary: Any, folder: Path) -> "Built":
        name, shared = binary.metadata.name, binary.metadata.shared
        if "amdgcn" in binary.asm:
            found = {key: int(n) for key, n in re.findall(r"\.(\w+):\s+(\d+)", binary.asm["amdgcn"])}
            return cls(
                name, found["vgpr_count"], 4 * found["vgpr_spill_count"] + found["private_segment_fixed_size"], shared
            )
        (folder / "kernel.cubin").write_bytes(binary.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(folder / "kernel.cubin")]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        words = dict(word.split(":") for word in used.split() if word.count(":") == 1 and word.split(":")[1].isdigit())
        return cls(name, int(words["REG"]), int(words["STACK"]) + int(words["LOCAL"]), shared)


def table(
    compiled: Callable, folder: Path, chips: Iterable[str], steps: Iterable[str]
) -> dict[tuple[str, str], list[Built]]:
    """Prints and returns what each takes."""
    print(f"\n{'chip':8s} {'step':26s} {'kernel':18s} {'registers':>9s} {'spilled':>8s} {'shared':>8s}")
    found = {}
    for chip in chips:
        for step in steps:
            found[chip, step] = rows = [Built.of(binary, folder) for binary in compiled(chip, STEP[step])]
            for row in rows:
                print(f"{chip:8s} {step:26s} {row.kernel:18s} {row.registers:9d} {row.spilled:8d} {row.shared:8d}")
    return found


MOST = {  # registers, spilled bytes
    "attend": (255, 64),
    "combine": (80, 0),
    "deal": (32, 0),
    "rotate_and_write": (40, 0),
    "normalise": (48, 0),
    "gate": (40, 0),
    "multiply": (168, 0),
    "choose": (64, 0),
    "sort": (72, 0),
    "add_up": (64, 0),
    "survey": (128, 8),
    "decide": (48, 0),
}
"""What a thread may take on NVIDIA's chips."""


def held(found: dict[tuple[str, str], list[Built]]) -> None:
    """A table's binaries keep within the bounds."""
    for (chip, step), rows in found.items():
        for row in rows:
            registers, spilled = (512, 0) if chip.startswith("gfx") else MOST[row.kernel]
            assert row.registers <= registers and row.spilled <= spilled, (chip, step, row)


def test_a_step_s_kernels_fit(compiled, tmp_path):
    found = table(compiled, tmp_path, ["sm_90"], STEP)
    held(found)
    for name, launches in LAUNCHES.items():  # what the engine's tests count
        assert len(found["sm_90", name]) == launches, name


@pytest.mark.slow
@pytest.mark.parametrize("chip", [name for name in CHIPS if name != "sm_90"])
def test_a_step_s_kernels_fit_every_chip(chip, compiled, tmp_path):
    held(table(compiled, tmp_path, [chip], STEP))


def test_logits_are_read_in_full_width(compiled):
    """16 values of 16 bits a thread and chunk: two loads of 128 bits, and one of 16 for the mask token's."""
    ptx = compiled("sm_90", lambda: survey(HALF, 0.0, True))[0].asm["ptx"]
    loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    assert sorted(int(many or 1) * int(bits) for many, bits in loads) == [16, 128, 128]


@pytest.mark.slow
def test_a_block_decode_on_an_h200_keeps_keys_in_flight_and_spills_next_to_nothing(compiled, tmp_path):
    """What the 80 % of bandwidth rests on: asynchronous copies, warp-group products, two programs a multiprocessor."""
    (_, binary) = compiled("sm_90", lambda: attend(torch.bfloat16, 128, block_length=None, split=False, group=1))
    assert "wgmma.mma_async" in binary.asm["ptx"] and "cp.async" in binary.asm["ptx"]
    assert 2 * binary.metadata.shared < H200.shared_memory
    (tmp_path / "kernel.cubin").write_bytes(binary.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = int(used.split(" STACK:")[1].split()[0])  # bytes a thread; Triton 3.6 spills none, 3.9 a few
    assert stack <= 64 and " LOCAL:0 " in used, used


def test_a_head_too_wide_is_a_users_error():

    refused("heads of 512 channels", chips.tile_of, 512, 2, H200)
