"""The C kernels with gradients, against torch's own operations in fp64; products of halves within their stated error."""

import pytest
import torch
import torch.nn.functional as F

from dlm.kernels.c import binding, trained
from dlm.models.attention import rotate

pytestmark = pytest.mark.skipif(binding.unavailable() is not None, reason="no kernels in C here")


def same(ours, theirs, *inputs: torch.Tensor, within: float = 2e-6) -> None:
    """Result and gradients of `ours` in fp32 are those of `theirs` in fp64, by the norm of the difference."""
    draw = torch.Generator().manual_seed(7)
    single = [x.clone().requires_grad_() for x in inputs]
    double = [x.double().requires_grad_() for x in inputs]
    out, exact = ours(*single), theirs(*double)
    slope = torch.randn(out.shape, generator=draw)
    (out * slope).sum().backward()
    (exact * slope).sum().backward()
    pairs = [(out, exact), *((x.grad, y.grad) for x, y in zip(single, double, strict=True))]
    for found, expected in pairs:
        assert found is not None and expected is not None
        assert (found - expected).norm() <= within * expected.norm()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(2, 300, 64), (5, 3, 2, 37), (1, 7)])
def test_norms(shape):
    def exact(x, weight):
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    same(lambda x, w: trained.rms_norm(x, w, 1e-5), exact, normal(*shape), normal(shape[-1], seed=1))


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_gates(size):
    same(trained.gated, lambda gate, up: F.silu(gate) * up, size * normal(5, 33, 7), normal(5, 33, 7, seed=1))


@pytest.mark.parametrize("wide", [16, 24])
def test_rotations_of_all_or_the_first_channels(wide):
    cos, sin = (torch.cat((half, half), -1) for half in (normal(2, 9, 1, 8, seed=3), normal(2, 9, 1, 8, seed=4)))
    same(
        lambda x: trained.rotate(x, cos, sin), lambda x: rotate(x, cos.double(), sin.double()), normal(2, 9, 4, wide)
    )  # fmt: skip


@pytest.mark.parametrize("strided", [False, True])
def test_read_what_does_not_lie_in_order(strided):
    x = normal(6, 40, 32).transpose(0, 1) if strided else normal(40, 6, 32)
    same(lambda a: trained.gated(a, a), lambda a: F.silu(a) * a, x)
    same(lambda a: trained.rms_norm(a, torch.ones(32), 1e-6), lambda a: F.rms_norm(a, (32,), eps=1e-6), x)


def test_are_for_plain_fp32_tensors_with_gradients():
    x = normal(3, 4)
    assert trained.takes(x) and trained.takes(torch.nn.Parameter(x))
    assert not trained.takes(x, x.double()) and not trained.takes(x.bfloat16())
    with torch.no_grad():
        assert not trained.takes(x)


halves = pytest.mark.skipif(trained.no_halves() is not None, reason="this processor does not multiply halves")


@halves
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (5, 7, 3), (97, 513, 65), (200, 64, 1100), (12, 600, 64)])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e5])
def test_products_of_halves(m, k, n, size):
    def linear(x, weight):
        with trained.halves():
            return F.linear(x, weight)

    same(linear, lambda x, w: x @ w.T, size * normal(m, k), 0.03 * normal(n, k, seed=1), within=2.5e-3)


@halves
def test_layers_with_a_bias_and_other_operations_stay_exact():
    x, w, b = normal(4, 8).requires_grad_(), normal(3, 8), normal(3)
    with trained.halves():
        assert torch.equal(F.linear(x, w, b), x @ w.T + b) and torch.equal(torch.mm(x, w.T), x @ w.T)
        assert type(F.linear(x, w).grad_fn).__name__ == "_LinearBackward"


@halves
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad):
    x, w = normal(30, 70), normal(20, 70)
    x[3, 5] = bad
    found = trained.half_product(x, w.T)
    assert not found[3].isfinite().any() and found[[0, 29]].isfinite().all()


@halves
def test_threads_change_no_bit():
    x, w, before = normal(500, 600), normal(130, 600), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = trained.half_product(x, w.T)
        torch.set_num_threads(2)
        assert torch.equal(one, trained.half_product(x, w.T))
    finally:
        torch.set_num_threads(before)
