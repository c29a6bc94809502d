"""Gates, routing and mixtures of experts against their twins, run as interpreted.py is."""

from typing import Any

import pytest
import torch

from dlm.kernels import experts, gate, grouped, reference
from dlm.kernels.routing import Routing
from tests.inference.tiny import tiny_lm
from tests.kernels.interpreted import CASES, DTYPES, TOLERANCE, bounds, products, pytestmark

__all__ = ["bounds", "products", "pytestmark"]  # pytest finds them here


@pytest.mark.parametrize(("n", "f"), [(1, 3), (7, 40), (3, 1500), (0, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(n, f, dtype):
    wide = 4 * torch.randn(n, 2 * f + 3, generator=torch.Generator().manual_seed(f)).to(dtype)
    wide[:, 2 * f :] = float("nan")
    wide[:1, 0] = -100.0
    found, twin = gate.gated(wide[:, : 2 * f]), reference.gated(wide[:, : 2 * f])
    assert found.dtype == dtype and found.shape == (n, f)
    torch.testing.assert_close(found, twin, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if dtype == torch.float16 and n * f > 1000:  # silu is rounded before the product
        assert (found == twin).float().mean() > 0.99


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that tiny shapes have several."""
    monkeypatch.setattr(grouped, "SIDE", {2: 16, 4: 16})
    monkeypatch.setattr(experts, "SIDE", {2: 16, 4: 16})
    monkeypatch.setattr(experts, "PAIRS", 64)
    monkeypatch.setattr(experts, "VALUES", 32)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote is NaN, or no number of a row."""
    empty = torch.empty

    def full(*size: Any, **options: Any) -> torch.Tensor:
        found = empty(*size, **options)
        return found.fill_(float("nan") if found.is_floating_point() else 10**6)

    monkeypatch.setattr(torch, "empty", full)


@pytest.mark.usefixtures("little", "poisoned")
@pytest.mark.parametrize(("n", "d", "f"), [(1, 16, 16), (37, 50, 21), (64, 8, 70), (0, 8, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_product(n, d, f, dtype):
    draws = torch.Generator().manual_seed(n)
    x = torch.full((n, d + 3), float("nan"), dtype=dtype)
    x[:, :d] = torch.randn(n, d, generator=draws)
    x, weight = x[:, :d], torch.randn(2 * f, d, generator=draws).to(dtype) / 4
    found = grouped.gated_product(x, weight)
    torch.testing.assert_close(
        found, reference.gated_product(x, weight), atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype]
    )
    if n > 20:
        assert torch.equal(grouped.gated_product(x[17:20], weight), found[17:20]), "the same bits in any company"


ROUTINGS = {
    "llada2": (Routing(chosen=3, sigmoid=True, normalised=True, factor=2.5, groups=4, kept_groups=2), 12, True),
    "llada2, many": (Routing(chosen=8, sigmoid=True, normalised=True, factor=2.5, groups=8, kept_groups=4), 256, True),
    "llada_moe": (Routing(chosen=4, sigmoid=False, normalised=False), 11, False),
    "sdar_moe": (Routing(chosen=8, sigmoid=False, normalised=True), 128, False),
    "one": (Routing(chosen=1, sigmoid=True, normalised=False, factor=0.5), 3, True),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_routing(name, dtype):
    routing, count, biased = ROUTINGS[name]
    draws = torch.Generator().manual_seed(count)
    x, weight = torch.randn(9, 40, generator=draws).to(dtype), torch.randn(count, 40, generator=draws).to(dtype) / 4
    bias = 0.5 * torch.randn(count, generator=draws) if biased else None
    chosen, weights = experts.route(x, weight, bias, routing)
    expected, expected_weights = reference.route(x, weight, bias, routing)
    assert torch.equal(chosen.long(), expected)
    torch.testing.assert_close(weights, expected_weights, atol=2e-6, rtol=2e-5)
    x[4] = float("nan")
    broken, _ = experts.route(x, weight, bias, routing)
    assert ((broken >= 0) & (broken < count)).all() and torch.equal(broken[5:], chosen[5:])


@pytest.mark.usefixtures("little", "poisoned")
@pytest.mark.parametrize("seed", range(CASES))
def test_mixture(seed):
    dtype, draws = DTYPES[seed % 2], torch.Generator().manual_seed(seed)
    n, k, e, d, f = [(1, 2, 5, 16, 16), (40, 3, 7, 33, 21), (23, 4, 4, 16, 40), (90, 1, 3, 20, 16)][seed % 4]
    x, shared = (torch.randn(n, d, generator=draws).to(dtype) for _ in range(2))
    gate_up = torch.randn(e, 2 * f, d, generator=draws).to(dtype) / 4
    down = torch.randn(e, d, f, generator=draws).to(dtype) / 4
    chosen = torch.stack([torch.randperm(e, generator=draws)[:k] for _ in range(n)])
    if seed % 3 == 0:
        chosen[:, 0] = 1  # most go to one
    weights = torch.rand(n, k, generator=draws)
    chosen = chosen if seed % 2 else chosen.int()
    given = {"shared": shared if seed % 3 else None}
    found = experts.mixture(x, chosen, weights, gate_up, down, **given)
    expected = reference.mixture(x, chosen, weights, gate_up, down, **given)
    near = {"atol": 4 * TOLERANCE[dtype], "rtol": 4 * TOLERANCE[dtype]}
    torch.testing.assert_close(found, expected, **near)
    few = experts.mixture(x[-1:], chosen[-1:], weights[-1:], gate_up, down, shared=shared[-1:] if seed % 3 else None)
    assert torch.equal(few, found[-1:]), "the same bits in any company"
    parts = [
        room.mixture(x, chosen, weights, gate_up[a:b], down[a:b], None, a, torch.float32)
        for room in (experts, reference)
        for a, b in ((0, 2), (2, e))
    ]
    whole = experts.mixture(x, chosen, weights, gate_up, down).float()
    for one, other in (parts[:2], parts[2:]):
        torch.testing.assert_close(one + other, whole, **near)


@pytest.mark.usefixtures("little")
def test_every_pair_has_one_place_and_every_tile_one_expert():
    for seed in range(8):
        chosen = torch.randint(0, 9, (1 + 11 * seed, 2), generator=torch.Generator().manual_seed(seed))
        chosen[seed:, 0] = 4
        found = experts.arrange(chosen, 6, 2, 16)  # those of 2 to 7
        mine = (chosen.flatten() - 2).tolist()
        expected = [p for e in range(6) for p, name in enumerate(mine) if name == e]
        assert found.order[: len(expected)].tolist() == expected
        covered = []
        for e, first in zip(found.experts.tolist(), found.firsts.tolist(), strict=True):
            if e >= 0:
                covered += [(e, place) for place in range(first, min(first + 16, int(found.ends[e])))]
        assert covered == [(mine[p], place) for place, p in enumerate(expected)]


def test_a_mixture_decodes_the_same_tokens_by_its_kernels():
    """Through the network: routing, experts and shared ones, gates and head norms."""
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, "n_group": 4, "topk_group": 2}
    lm = tiny_lm(
        qk_norm=True, head_dim=16, moe=moe | {"num_shared_experts": 1, "expert_bias": True, "first_k_dense": 1}
    )
    ids = torch.arange(9)[None]
    with torch.no_grad():
        fused = lm.network(ids)
    exact = lm.network(ids)
    torch.testing.assert_close(fused, exact.detach(), atol=2e-5, rtol=1e-5)
    exact.sum().backward()  # gradients take torch's own operations
    assert all(p.grad is not None and p.grad.isfinite().all() for p in lm.network.layers[1].mlp.parameters())
