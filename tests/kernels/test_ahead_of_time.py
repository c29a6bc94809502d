"""Every kernel, compiled by the launchers themselves for every chip we claim, without a GPU.

The launches are real up to the point where the binary would run: a driver that only names a target stands in for the GPU.
"""

import os
import subprocess
from collections.abc import Callable

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

from dlm.kernels import attention, norm, pick, rope
from tests.refusals import refused

H200 = attention.Chip(132, 232448, 9)
CHIPS = {  # target, what the launchers ask a chip, the binary's name
    "sm_80": (GPUTarget("cuda", 80, 32), attention.Chip(108, 166912, 8), "cubin"),
    "sm_90": (GPUTarget("cuda", 90, 32), H200, "cubin"),
    "sm_100": (GPUTarget("cuda", 100, 32), attention.Chip(148, 232448, 10), "cubin"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), attention.Chip(304, 65536, 0), "hsaco"),
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
        monkeypatch.setattr(attention.Chip, "of", lambda _: CHIPS[name][1])
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


def write(dtype: torch.dtype, head_dim: int, rotated: int) -> None:
    q, k = torch.zeros(32, 32, head_dim, dtype=dtype), torch.zeros(32, 8, head_dim, dtype=dtype)
    pages = torch.zeros(4, 16, 8, head_dim, dtype=dtype)
    angle = torch.zeros(32, rotated, dtype=dtype) if rotated else None
    rope.rope_write(q, k, k, angle, angle, pages, pages, torch.arange(32))


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
    assert len(compiled(chip, lambda: attend(torch.bfloat16, 128, block_length=None, split=True))) == 2


def test_the_rest_of_a_step_compiles(compiled):
    compiled("sm_90", lambda: write(torch.bfloat16, 128, 128))
    compiled("sm_90", lambda: normalise(torch.bfloat16, 4096, True))
    assert len(compiled("sm_90", lambda: survey(torch.bfloat16, 1.0, True))) == 2


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


@pytest.mark.slow
def test_a_block_decode_on_an_h200_keeps_keys_in_flight_and_spills_next_to_nothing(compiled, tmp_path):
    """What the 80 % of bandwidth rests on: asynchronous copies, warp-group products, two programs a multiprocessor."""
    (binary,) = compiled("sm_90", lambda: attend(torch.bfloat16, 128, block_length=None, split=False, group=1))
    assert "wgmma.mma_async" in binary.asm["ptx"] and "cp.async" in binary.asm["ptx"]
    assert 2 * binary.metadata.shared < H200.shared_memory
    (tmp_path / "kernel.cubin").write_bytes(binary.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = int(used.split(" STACK:")[1].split()[0])  # bytes a thread; Triton 3.6 spills none, 3.9 a few
    assert stack <= 64 and " LOCAL:0 " in used, used


def test_a_head_too_wide_is_a_users_error():

    refused("heads of 512 channels", attention.tile_of, 512, 2, H200)
