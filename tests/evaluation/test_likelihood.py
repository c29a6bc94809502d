"""Likelihoods against all orders by brute force, and their spread beside LLaDA's and Dream's published estimators.

LLaDA's and Dream's are written here from their formulas: `eval_llada.py` (k spread over a batch by a rounded linspace) and
Dream's `eval/` (t = (u + i / batch) mod 1, each token masked with probability t).
"""

from itertools import permutations

import numpy as np
import pytest
import torch

import dlm
from dlm.evaluation import likelihood
from dlm.evaluation.draws import Likelihood, Span, plan_of, widened
from dlm.evaluation.likelihood import apart, is_greedy, likelihoods
from tests.inference.requests import FAMILIES
from tests.inference.tiny import MASK, text_lm

LENGTHS = {4: 12, 7: 6}


def model(seed=3, **fields):
    return text_lm(seed=seed, spread=0.5, **fields)


def span_at(number, tokens, given=3):
    ids = np.random.default_rng(number).integers(97, 123, given + tokens)
    return Span(ids=tuple(map(int, ids)), tokens=tokens, address=number)


def costs(lm, span):
    """For each set of masked tokens, as a tuple of bool: the cross-entropy of each, by numpy from logits."""
    table = {}
    for number in range(2**span.tokens):
        mask = np.array([bool(number >> i & 1) for i in range(span.tokens)])
        shown = np.array(span.ids)
        shown[span.given :][mask] = MASK
        with torch.no_grad():
            logits = lm.network(torch.tensor(shown)[None])[0].double().numpy()[span.given :]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        table[tuple(mask)] = np.where(mask, -log_p[np.arange(span.tokens), list(span.ids[span.given :])], 0)
    return table


def over_all_orders(table, tokens):
    """The mean over all orders of the sum over their steps: what the bound is."""
    found = []
    for order in permutations(range(tokens)):
        masked, total = np.ones(tokens, bool), 0.0
        for token in order:
            total += table[tuple(masked)][token]
            masked[token] = False
        found.append(total)
    return float(np.mean(found))


def by_sets(table, tokens):
    """The same by the weight of each set: for lengths whose orders are too many."""
    from math import comb

    return sum(c.sum() / (sum(m) * comb(tokens, sum(m))) for m, c in table.items() if any(m))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_short_answer_is_exactly_the_mean_over_all_orders(tokens):
    lm = model()
    for number in range(4):
        span = span_at(number, tokens)
        (found,) = likelihoods(lm, [span], draws=16)
        assert found.error == 0 and found.draws == 2**tokens - 1
        assert found.nats == pytest.approx(over_all_orders(costs(lm, span), tokens), rel=1e-5)


def test_blocks_are_enumerated_each_alone_and_added():
    lm = model(**FAMILIES["sdar"])
    size = lm.network.attention.block_length
    span = span_at(1, 2 * size + 1, given=size + 1)
    (found,) = likelihoods(lm, [span], draws=2**size - 1)
    assert found.error == 0 and found.draws == 2**size - 1
    total = 0.0
    for first in range(size, len(span.ids), size):
        given = max(first, span.given)
        ids = span.ids[: first + size]
        total += over_all_orders(costs(lm, Span(ids, len(ids) - given, 0)), len(ids) - given)
    assert found.nats == pytest.approx(total, rel=1e-5)
    (drawn,) = likelihoods(lm, [span], draws=2**size - 2)
    assert drawn.error > 0 and abs(drawn.nats - total) < 5 * drawn.error


def drawn(table, span, draws, seed):
    """Our estimate from the table: the same masks and weights as the model would be asked with."""
    plan = plan_of(span, None, draws, seed, most=0)
    plan.costs += [table[tuple(mask)] for mask in plan.masks]
    return plan.result()


def of_llada(table, tokens, batch, rng):
    k = rng.integers(1, tokens + 1)
    counts = (np.round(np.linspace(k, k + (batch - 1) * (tokens / batch), batch)).astype(int) - 1) % tokens + 1
    found = 0.0
    for count in counts:
        mask = np.zeros(tokens, bool)
        mask[rng.permutation(tokens)[:count]] = True
        found += tokens / count * table[tuple(mask)].sum()
    return found / batch


def of_dream(table, tokens, batch, rng):
    times = (rng.random() + np.arange(batch) / batch) % 1
    found = 0.0
    for t in np.maximum(times, 1e-3):
        found += table[tuple(rng.random(tokens) < t)].sum() / t
    return found / batch


@pytest.fixture(scope="module")
def tables():
    lm = model()
    return {n: [(s, costs(lm, s)) for s in (span_at(i, n) for i in range(count))] for n, count in LENGTHS.items()}


@pytest.mark.parametrize(("tokens", "draws"), [(4, 8), (7, 8), (7, 16), (7, 32)])
def test_intervals_cover_and_draws_lie_within_three_errors(tables, tokens, draws):
    near, covered = [], []
    for span, table in tables[tokens]:
        truth = by_sets(table, tokens)
        for seed in range(15):
            one = drawn(table, span, draws, seed)
            low, high = one.interval
            near.append(abs(one.nats - truth) < 3 * one.error)
            covered.append(low <= truth <= high)
    assert np.mean(near) > 0.98 and np.mean(covered) >= 0.90
    assert tokens == 4 or np.mean(covered) <= 0.995


@pytest.mark.parametrize(("tokens", "draws"), [(4, 8), (7, 8), (7, 16)])
def test_no_bias_and_less_spread_than_the_published_estimators(tables, tokens, draws):
    rng = np.random.default_rng(0)
    off = {"ours": [], "llada": [], "dream": []}
    for span, table in tables[tokens]:
        truth = by_sets(table, tokens)
        off["ours"].append([drawn(table, span, draws, seed).nats - truth for seed in range(25)])
        off["llada"].append([of_llada(table, tokens, draws, rng) - truth for _ in range(25)])
        off["dream"].append([of_dream(table, tokens, draws, rng) - truth for _ in range(25)])
    spread = {name: np.mean(np.std(values, axis=1)) for name, values in off.items()}
    ours = np.concatenate(off["ours"])
    assert abs(ours.mean()) < 4 * ours.std() / len(ours) ** 0.5
    assert spread["ours"] < spread["llada"] and spread["ours"] < 0.6 * spread["dream"], spread


def test_every_set_of_so_many_tokens_is_as_likely():
    """The design's tokens change places at random: what an unbiased estimate needs."""
    seen = {}
    for seed in range(400):
        plan = plan_of(span_at(0, 4), None, 8, seed, most=0)
        for row in plan.masks:
            seen[tuple(row)] = seen.get(tuple(row), 0) + 1
    for k, sets in ((1, 4), (2, 6), (3, 4), (4, 1)):
        found = [count for mask, count in seen.items() if sum(mask) == k]
        assert len(found) == sets and sum(found) == 400 * 2
        assert np.array(found) / sum(found) == pytest.approx(1 / sets, abs=5 * (1 / sets / 800) ** 0.5)


def test_no_token_is_masked_much_more_than_others():
    plan = plan_of(span_at(0, 8), None, 16, 3, most=0)
    for group in (slice(0, 8), slice(8, 16)):
        per_token = (plan.masks[group] / plan.masks[group].sum(1, keepdims=True)).sum(0)
        assert per_token.max() < 1.5 * per_token.min()
        pairs = plan.masks[group].sum(1).reshape(4, 2).sum(1)
        assert pairs.max() - pairs.min() <= 2  # one of few masked tokens with one of many


def test_student_s_quantiles():
    """Of a table: 97.5 % at 1, 2, 3, 4, 7, 15, 63 degrees of freedom."""
    published = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 8: 2.365, 16: 2.131, 64: 1.998}
    assert [widened(n) * 1.959964 for n in published] == pytest.approx(list(published.values()), rel=1.5e-3)
    assert widened(1) == float("inf")


def test_counts_are_all_as_likely_and_llada_s_are_not():
    """At L = 4 and a batch of 8 their rounding to even takes even counts three times as often."""
    first = np.arange(1, 5)[:, None]
    counts = (np.round(first + np.arange(8) * 0.5).astype(int) - 1) % 4 + 1
    assert np.bincount(counts.ravel(), minlength=5)[1:] / counts.size == pytest.approx([1 / 8, 3 / 8, 1 / 8, 3 / 8])
    plans = [plan_of(span_at(0, 4), None, 8, seed, most=0) for seed in range(25)]
    ours = np.bincount(np.concatenate([plan.masks.sum(1) for plan in plans]), minlength=5)[1:] / 200
    assert ours == pytest.approx([0.25] * 4, abs=1e-9)  # stratified: each as often as the others


def test_draws_come_from_the_model(tables):
    lm = model()
    span, table = tables[7][0]
    (found,) = likelihoods(lm, [span], draws=32, seed=5)
    assert found.nats == pytest.approx(drawn(table, span, 32, 5).nats, rel=1e-5)
    assert found.error == pytest.approx(drawn(table, span, 32, 5).error, rel=1e-3)
    assert len(found.samples) == 16 and found.draws == 32


def test_order_and_company_change_no_bit():
    lm = model()
    spans = [span_at(i % 3, 3 + i % 6) for i in range(12)]
    together = likelihoods(lm, spans, draws=8)
    assert likelihoods(lm, spans[::-1], draws=8)[::-1] == together
    alone = [Span(ids=(5, *span.ids), tokens=span.tokens, address=1) for span in spans[:2]]
    assert likelihoods(lm, [*alone, *spans], draws=8)[2:] == together


def test_drawing_ends_once_the_best_is_decided():
    lm = model()
    text = tuple(b"some context")
    answers = [tuple(b"abcdefgh"), tuple(b"zzzzzzzzzzzzzzzzzzzzzzzz"), tuple(b"hgfedcba")]
    spans = [Span(ids=text + a, tokens=len(a), address=9) for a in answers]
    far = likelihoods(lm, spans[:2], draws=128, early=True)
    assert far[0].draws < 128 and far[1].draws < 128 and apart(*sorted(far, key=lambda one: one.nats))
    full = likelihoods(lm, spans[:2], draws=128)
    assert [one.draws for one in full] == [128, 128]
    assert np.argmin([one.nats for one in far]) == np.argmin([one.nats for one in full])
    assert likelihoods(lm, [spans[0]], draws=32, early=True) == likelihoods(lm, [spans[0]], draws=32)
    close = likelihoods(lm, [spans[0], spans[0]], draws=32, early=True)
    assert [one.draws for one in close] == [32, 32]  # the same answer twice is never decided


def test_common_luck_does_not_count():
    luck = np.random.default_rng(0).normal(0, 10, 16)
    one, two = (Likelihood(nats=10 + d, error=2.5, draws=32, samples=tuple(10 + d + luck)) for d in (0.0, 1.0))
    assert apart(one, two)
    assert not apart(one, Likelihood(nats=11, error=2.5, draws=32))
    exact = [Likelihood(nats=n, error=0.0, draws=1) for n in (1.0, 1.5)]
    assert apart(*exact) and not apart(*exact[::-1])


@pytest.mark.parametrize("name", ["llada", "Dream", "sdar", "causal"])
def test_greedy_is_what_decoding_writes(name):
    kinds = {"causal": {"model_type": "qwen3", "attention": "causal", "shifted_logits": True}, "llada": {}}
    lm = model(seed=1, **(kinds[name] if name in kinds else FAMILIES[name]))
    prompt, tokens = list(b"abcde"), 8
    block = lm.network.attention.block_length or tokens
    settings = {} if name == "causal" else {"steps": tokens, "block_length": block}
    (written,) = dlm.generate(lm, [prompt], gen_length=tokens, **settings)
    ids = (*prompt, *written.tokens)
    assert is_greedy(lm, Span(ids=ids, tokens=len(written.tokens), address=0))
    for at in (5, len(ids) - 1):
        other = (*ids[:at], ids[at] ^ 1, *ids[at + 1 :])
        assert not is_greedy(lm, Span(ids=other, tokens=len(written.tokens), address=0))


def test_nothing_to_score_costs_nothing():
    for name in ("llada", "sdar"):
        lm = model(**(FAMILIES["sdar"] if name == "sdar" else {}))
        assert likelihoods(lm, [Span(ids=(1, 2), tokens=0, address=0)])[0].nats == 0
    assert likelihoods(model(), []) == []
    assert likelihood.ROWS > 0
