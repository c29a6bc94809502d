"""Choosing tokens, on a vocabulary of a few words and against numpy."""

import math

import numpy as np
import pytest
import torch

from dlm.diffusion.choose import Address, BrokenLogits, argmax, choose, guide, truncate

MASK = 7
V = 8


def address(n: int, step: int = 0, seed: int = 0) -> Address:
    position = torch.arange(n)
    zeros = torch.zeros_like(position)
    return Address(seed=zeros + seed, sample=zeros, step=zeros + step, position=position)


def random_logits(n: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(n, V, generator=torch.Generator().manual_seed(seed))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_greedy_takes_the_highest_and_ties_go_to_the_lower_id():
    logits = torch.tensor([[0.0, 3, 1, 3, 0, 0, 0, 0], [1.0, 1, 1, 1, 1, 1, 1, 1]])
    signals = choose(logits, mask_id=None)
    assert signals.token.tolist() == [1, 0]
    assert signals.top[1].tolist() == [[1, 3], [0, 1]]


@pytest.mark.parametrize("v", [8, 1000, 1024, 4096])
def test_argmax_is_the_lowest_id_of_the_highest(v):
    draw = torch.Generator().manual_seed(v)
    x = torch.randint(0, 40, (50, v), generator=draw).float()
    x[0] = 1.0
    x[1, v // 2 :] = 50.0
    first = [next(i for i, value in enumerate(row) if value == max(row)) for row in x.tolist()]
    assert argmax(x).tolist() == first
    assert argmax(x[:0]).tolist() == []
    wide = torch.randint(0, 40, (50, v + 3), generator=draw).float()[:, :v]
    assert torch.equal(argmax(wide), wide.argmax(-1))


def test_logits_are_left_as_they_were():
    logits = random_logits(4)
    before = logits.clone()
    choose(logits, mask_id=MASK)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_is_never_chosen_and_stays_in_the_softmax_where_its_logit_was_left(temperature):
    logits = random_logits(50)
    for logits[:, MASK] in (6.0, float("-inf")):
        signals = choose(logits, mask_id=MASK, temperature=temperature, address=address(50))
        assert (signals.token != MASK).all()
        p = softmax(logits.double().numpy())
        np.testing.assert_allclose(signals.confidence, p[np.arange(50), signals.token], rtol=1e-5)


def test_margin_and_entropy_against_numpy():
    logits = random_logits(40, seed=1)
    signals = choose(logits, mask_id=MASK)
    p = softmax(logits.double().numpy())
    np.testing.assert_allclose(signals.entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)
    candidates = -np.sort(-p[:, :MASK], axis=-1)
    np.testing.assert_allclose(signals.margin, candidates[:, 0] - candidates[:, 1], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(signals.top[1][:, 0], signals.token)


def test_entropy_of_a_certain_row_is_zero():
    logits = torch.full((1, V), float("-inf"))
    logits[0, 2] = 0.0
    signals = choose(logits, mask_id=MASK)
    assert signals.entropy.tolist() == [0.0]
    assert signals.margin.tolist() == [1.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature):
    n = 40_000
    row = torch.tensor([[1.0, 0.5, 0, -0.5, -1, -2, 1.5, float("-inf")]])
    tokens = choose(row.expand(n, -1), mask_id=MASK, temperature=temperature, address=address(n)).token
    p = softmax(row.double().numpy() / temperature)[0, :MASK]
    counts = np.bincount(tokens, minlength=V)[:MASK]
    chi2 = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi2 < 6 + 5 * math.sqrt(12)


def test_a_draw_depends_on_its_address_alone():
    logits = random_logits(30)
    where = address(30)
    together = choose(logits, mask_id=MASK, temperature=1.0, address=where).token
    for i in (0, 7, 29):
        own = Address(**{name: value[i : i + 1] for name, value in vars(where).items()})
        assert choose(logits[i : i + 1], mask_id=MASK, temperature=1.0, address=own).token == together[i]
    later = choose(logits, mask_id=MASK, temperature=1.0, address=address(30, step=1)).token
    assert (later != together).any()


@pytest.mark.parametrize("temperature", [1e-4, 1e-30])
def test_the_coldest_draw_is_greedy(temperature):
    logits = 1e10 * random_logits(20)
    cold = choose(logits, mask_id=MASK, temperature=temperature, address=address(20))
    assert torch.equal(cold.token, choose(logits, mask_id=MASK).token)


@pytest.mark.parametrize("k", [1, 3, 8, 20])
def test_top_k_keeps_k_and_prefers_lower_ids(k):
    logits = torch.tensor([[0.0, 2, 1, 1, 1, 2, 0, 0]])
    order = sorted(range(V), key=lambda i: (-logits[0, i].item(), i))
    assert set(truncate(logits, k, None).isfinite().nonzero()[:, 1].tolist()) == set(order[:k])


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [None, 4])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, top_k):
    logits = random_logits(60, seed=3)
    kept = truncate(logits, top_k, top_p).isfinite()
    for row, found in zip(logits.double().tolist(), kept.tolist(), strict=True):
        order = sorted(range(V), key=lambda i: -row[i])[:top_k]
        weights = [math.exp(row[i]) for i in order]
        total, reached, expected = sum(weights), 0.0, set()
        for i, weight in zip(order, weights, strict=True):
            if reached >= top_p - 1e-6 and expected:
                break
            expected.add(i)
            reached += weight / total
        assert {i for i, yes in enumerate(found) if yes} == expected


def test_confidence_is_of_the_truncated_distribution():
    logits = random_logits(50, seed=4)
    signals = choose(logits, mask_id=MASK, temperature=0.7, top_k=3, address=address(50))
    candidates = logits.double().numpy()[:, :MASK] / 0.7
    for i, token in enumerate(signals.token.tolist()):
        kept = np.argsort(-candidates[i])[:3]
        assert token in kept
        p = softmax(candidates[i][kept])
        assert signals.confidence[i].item() == pytest.approx(p[list(kept).index(token)], rel=1e-5)


def test_greedy_ignores_truncation():
    logits = random_logits(10)
    assert torch.equal(
        choose(logits, mask_id=MASK, top_k=1, top_p=0.1).confidence, choose(logits, mask_id=MASK).confidence
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_named_by_row(value, temperature):
    logits = random_logits(5)
    logits[3, 2] = value
    with pytest.raises(BrokenLogits, match="1 of 5 positions") as caught:
        choose(logits, mask_id=MASK, temperature=temperature, address=address(5))
    assert caught.value.rows.tolist() == [False, False, False, True, False]
    with pytest.raises(BrokenLogits):
        choose(torch.full((1, V), float("-inf")), mask_id=MASK)


def test_half_precision_is_widened():
    assert choose(random_logits(3).bfloat16(), mask_id=MASK).probabilities.dtype == torch.float32


def test_guidance_is_lladas_formula_and_keeps_the_mask_suppressed():
    c, u = random_logits(4), random_logits(4, seed=9)
    torch.testing.assert_close(guide(c, u, 0.5, MASK), u + 1.5 * (c - u))
    c[:, MASK] = u[:, MASK] = float("-inf")
    guided = guide(c, u, 0.5, MASK)
    assert guided[:, MASK].isneginf().all()
    assert guided[:, :MASK].isfinite().all()
