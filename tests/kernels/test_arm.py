"""The kernels in C on 64-bit ARM: cross-compiled, run by qemu, in the tests that this machine's own pass.

apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
python -m pytest -m outside tests/kernels/test_arm.py
"""

import shutil

import pytest
import torch

from dlm.kernels.c import binding, products
from tests.inference.test_fused import logits, stirred
from tests.kernels import machine
from tests.kernels.test_draws import (  # noqa: F401 (collected here too, with this file's library)
    test_broken_rows_are_told,
    test_where_only_rounding_decides_the_twin_does,
)
from tests.kernels.test_multiplies import (  # noqa: F401
    test_a_broken_row_stays_one_and_alone,
    test_bfloat16,
    test_gated,
    test_inputs_of_any_even_number,
    test_whole_numbers,
)
from tests.kernels.test_native import (  # noqa: F401
    test_a_row_gives_the_same_bits_alone_and_in_a_crowd,
    test_attention_of_more_rows_than_a_task_takes,
    test_confidence,
    test_norm,
    test_rotation_and_write,
)

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"
pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"{COMPILER} and {EMULATOR} are not installed"
    ),
    pytest.mark.skipif(binding.unavailable() is not None, reason=str(binding.unavailable())),
]


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    with machine.running(COMPILER, [EMULATOR, "-L", ROOT], tmp_path_factory.mktemp("arm"), []) as found:
        yield found


@pytest.fixture(autouse=True)
def build(arm, monkeypatch):
    """As in test_multiplies: this library in place of the machine's own."""
    monkeypatch.setattr(binding, "loaded", lambda: arm)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield "ARM"


def test_it_is_another_machine():
    assert (
        products.panel_width() == 8
        and not products.multiplies("bf16-dots")
        and products.fastest(torch.bfloat16) == "bf16-widened"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["norms of heads", "one key head, uneven widths"])
def test_all_layers(name, dtype, monkeypatch):
    lm = stirred(3, name)
    lm.network.to(dtype)
    found, expected = (logits(lm, monkeypatch, range(2), kernels=path) for path in ("c", "torch"))
    near = 1e-4 if dtype == torch.float32 else 0.1
    for request, steps in expected.items():
        torch.testing.assert_close(found[request][0].float(), steps[0].float(), rtol=near, atol=near)
