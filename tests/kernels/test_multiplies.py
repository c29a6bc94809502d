"""Products of bfloat16 and int8 in C: every way of multiplying, in every width of vectors, against float64."""

import ctypes
import platform

import pytest
import torch

from dlm.kernels.c import binding, compiler, products
from dlm.kernels.c.built import load
from tests.kernels import narrow

pytestmark = pytest.mark.skipif(binding.library()[0] is None, reason=binding.library()[1])
AVX512, AVX2 = binding.FLAGS["AVX512"], binding.FLAGS["AVX2"]
BUILDS = {
    "this machine's": None,
    "no vectors": [],
    "AVX2": AVX2,
    "AMX emulated": [*AVX512, "-DEMULATED"],
}
"""Flags of a library; None is the one in use."""


@pytest.fixture(params=BUILDS)
def build(request, monkeypatch):
    """The kernels compiled so, in place of this machine's own."""
    flags = BUILDS[request.param]
    if flags is not None:
        capability, needs = torch.backends.cpu.get_cpu_capability(), AVX512[0] if AVX512[0] in flags else "".join(flags)
        if platform.machine() != "x86_64" or (needs and capability == "DEFAULT"):
            pytest.skip(f"{request.param}: not on this processor")
        if AVX512[0] in flags and capability != "AVX512":
            pytest.skip("AVX-512 is not there to emulate AMX beside")
        common = ["-std=gnu11", "-O2", "-fPIC", "-shared", *flags]
        library = load("native-test", binding.SOURCES, compiler.compiler(), common, binding.SIGNATURES)
        binding.declare(library)
        monkeypatch.setattr(binding, "loaded", lambda: library)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield request.param


def needs(kind: str) -> None:
    if not products.multiplies(kind):
        pytest.skip(f"this processor, or this build, does not do {kind}")


def product(kind, w, bias=None, copied=True):
    words = products.words(w)
    panels = products.panels(words) if copied else None
    addresses = [None if x is None else x.data_ptr() for x in (words, panels, bias)]
    made = products.Product(*addresses, *w.shape, words.stride(0), products.KINDS.index(kind))
    made.kept = words, panels, bias
    return made


def of_kind(kind, w):
    """A product of that kind, and what its weights stand for."""
    if kind.startswith("int"):
        return narrow.with_weights(w, kind)
    return product(kind, w.bfloat16()), w.bfloat16()


@pytest.mark.parametrize("kind", ["bf16-widened", "bf16-dots", "bf16-tiles"])
@pytest.mark.parametrize("inputs", [32, 96, 544, 1120])
def test_bfloat16(build, kind, inputs):
    needs(kind)
    for outputs, rows, copied, biased in (
        (1, 1, True, False),
        (32, 30, False, True),
        (150, 17, True, True),
        (77, 64, False, False),
    ):
        w, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(rows, inputs)
        bias = torch.randn(outputs) if biased else None
        found = products.linear(product(kind, w, bias, copied), x)
        factor = x if kind == "bf16-widened" else x.bfloat16()
        exact = factor.double() @ w.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["bf16-widened", "bf16-dots"])
def test_inputs_of_any_even_number(build, kind):
    needs(kind)
    for inputs in (2, 6, 20, 514):
        w, x = torch.randn(40, inputs).bfloat16(), torch.randn(20, inputs).bfloat16().float()
        for copied in (True, False):
            found = products.linear(product(kind, w, None, copied), x)
            torch.testing.assert_close(found.double(), x.double() @ w.double().T, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("kind", products.KINDS[1:])
def test_a_row_gives_the_same_bits_alone_and_on_any_number_of_threads(build, kind):
    needs(kind)
    w, x = torch.randn(70, 608), torch.randn(45, 608)
    made, _ = of_kind(kind, w)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(products.linear(made, x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert all(torch.equal(products.linear(made, x[i : i + 1])[0], found[0][i]) for i in range(45))


@pytest.mark.parametrize("kind", products.KINDS[1:])
def test_a_broken_row_stays_one_and_alone(build, kind):
    needs(kind)
    w, x = torch.randn(40, 128), torch.randn(20, 128)
    made, _ = of_kind(kind, w)
    whole = products.linear(made, x)
    x[3, 5], x[7, 100], x[9] = float("nan"), float("inf"), 0.0
    found = products.linear(made, x)
    assert found[3].isnan().all() and not found[7].isfinite().any() and (found[9] == 0).all()
    others = [i for i in range(20) if i not in (3, 7, 9)]
    assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("kind", products.KINDS[1:])
@pytest.mark.parametrize("inputs", [64, 512, 640])
def test_gated(build, kind, inputs):
    needs(kind)
    w, x = torch.randn(2, 70, inputs) / 8, torch.randn(30, inputs)
    made, weights = zip(*(of_kind(kind, part) for part in w), strict=True)
    factor = x if kind.endswith("widened") else narrow.rounded(x, kind) if kind.startswith("int") else x.bfloat16()
    gate, up = (factor.double() @ part.double().T for part in weights)
    exact = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(products.gated(*made, x).double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["int8-widened", "int8-dots", "int16-dots"])
@pytest.mark.parametrize("inputs", [4, 64, 100, 512, 1124])
def test_whole_numbers(build, kind, inputs):
    needs(kind)
    for outputs, rows in ((1, 1), (32, 30), (150, 17), (77, 64)):
        w, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
        w[0] *= 100
        made, weights = narrow.with_weights(w, kind)
        factor = x if kind == "int8-widened" else narrow.rounded(x, kind)
        exact = factor.double() @ weights.double().T
        torch.testing.assert_close(
            products.linear(made, x).double(), exact, rtol=2e-5, atol=1e-4 * float(weights.abs().max())
        )


def test_int16_sums_of_the_largest_numbers_do_not_overflow(build):
    needs("int16-dots")
    w, x = torch.full((40, 512), 255 / 16).bfloat16(), torch.full((20, 512), 3.0)
    x[1::2] *= -1
    made, weights = narrow.with_weights(w, "int16-dots")
    assert torch.equal(weights, w.double())  # 12 bits hold what bfloat16 does
    torch.testing.assert_close(products.linear(made, x), x @ w.float().T)


def test_the_processor_says_what_it_has(build):
    named = ctypes.c_int64(99)
    assert all(products.multiplies(kind) in (True, False) for kind in products.KINDS) and named.value == 99
    assert (
        products.multiplies("float32") and products.multiplies("bf16-widened") and products.multiplies("int8-widened")
    )
    assert products.multiplies("bf16-tiles") or build != "AMX emulated"
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        assert products.multiplies(products.fastest(dtype))
