"""Every decode rule against its definition in plain Python, ties and degenerate rows included."""

import math

import pytest
import torch

from dlm.diffusion.choose import Signals
from dlm.diffusion.edit import edits, remasks
from dlm.diffusion.unmask import (
    RULES,
    Credit,
    Entropy,
    EntropyBound,
    EntropyThreshold,
    Factor,
    Hierarchical,
    LowConfidence,
    Margin,
    Random,
    Threshold,
    schedule,
)
from dlm.inference.config import SamplerConfig
from dlm.inference.readers import READ_BY

# --- the definitions, one row at a time: `scores` by position, `masked` a list of positions ---


def by_rank(scores, masked, sign=-1):
    return sorted(masked, key=lambda i: (sign * scores[i], i))


def highest(scores, masked, quota, rule):
    return set(by_rank(scores, masked)[:quota])


def lowest(scores, masked, quota, rule):
    return set(by_rank(scores, masked, sign=1)[:quota])


def reach_threshold(scores, masked, quota, rule):
    return {i for i in masked if scores[i] >= rule.threshold} | set(by_rank(scores, masked)[:1])


def sure_enough(scores, masked, quota, rule):
    return {i for i in masked if scores[i] <= rule.entropy_threshold} | set(by_rank(scores, masked, sign=1)[:1])


def reach_factor(scores, masked, quota, rule):
    accepted = set()
    for n, i in enumerate(by_rank(scores, masked), start=1):
        if n > 1 and not scores[i] >= 1 - rule.factor / (n + 1):
            break
        accepted.add(i)
    return accepted


def within_bound(scores, masked, quota, rule):
    accepted, spent = set(), 0.0
    for i in by_rank(scores, masked, sign=1):
        if spent > rule.gamma:
            break
        accepted.add(i)
        spent += scores[i]
    return accepted


def lead_runs(scores, masked, quota, rule):
    accepted = {i for i in masked if scores[i] > rule.threshold} | set(by_rank(scores, masked)[:1])
    run: list[int] = []
    for i in [*masked, math.inf]:
        if run and i != run[-1] + 1:
            best = by_rank(scores, run)[0]
            if scores[best] > rule.tau_low:
                accepted.add(best)
            run = []
        run.append(i)
    return accepted


CASES = [
    (LowConfidence(), highest),
    (Random(), highest),
    (Margin(), highest),
    (Entropy(), lowest),
    (Threshold(threshold=0.75), reach_threshold),
    (Factor(factor=1.0), reach_factor),
    (Factor(factor=0.25), reach_factor),
    (Factor(factor=100.0), reach_factor),
    (EntropyBound(gamma=0.5), within_bound),
    (EntropyBound(gamma=0.0), within_bound),
    (EntropyThreshold(entropy_threshold=0.25), sure_enough),
    (Hierarchical(threshold=0.75, tau_low=0.25), lead_runs),
    (Hierarchical(threshold=1.0, tau_low=0.0), lead_runs),
    (Credit(threshold=0.75), reach_threshold),
]


def rows(seed: int, b: int = 64, length: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores on a coarse grid, so that ties are many; the first rows have no mask, one, and nothing but masks."""
    draw = torch.Generator().manual_seed(seed)
    grid = (2, 5, 9)[seed % 3]
    score = torch.randint(0, grid, (b, length), generator=draw) / (grid - 1)
    if seed % 4 == 3:
        score = torch.rand(b, length, generator=draw)
    masked = torch.rand(b, length, generator=draw) < torch.rand(b, 1, generator=draw)
    masked[0], masked[1], masked[2] = False, torch.arange(length) == length - 1, True
    return score, masked, torch.randint(1, length + 2, (b,), generator=draw)


@pytest.mark.parametrize(
    ("rule", "definition"),
    CASES,
    ids=lambda part: part.__name__ if callable(part) and hasattr(part, "__name__") else str(part),
)
def test_rule_is_its_definition(rule, definition):
    for seed in range(12):
        score, masked, quota = rows(seed)
        commit = rule(score, masked, quota)
        for i in range(len(score)):
            positions = masked[i].nonzero()[:, 0].tolist()
            expected = definition(score[i].tolist(), positions, quota[i].item(), rule)
            assert set(commit[i].nonzero()[:, 0].tolist()) == expected, (score[i], masked[i])


@pytest.mark.parametrize("rule", [rule for rule, _ in CASES], ids=str)
def test_rows_are_independent_and_progress_is_certain(rule):
    score, masked, quota = rows(3)
    commit = rule(score, masked, quota)
    assert not (commit & ~masked).any()
    assert torch.equal(commit.any(-1), masked.any(-1))
    for i in range(0, 64, 7):
        alone = rule(score[i : i + 1], masked[i : i + 1], quota[i : i + 1])
        assert torch.equal(alone[0], commit[i])
    wide = torch.nn.functional.pad(score, (0, 5), value=2.0), torch.nn.functional.pad(masked, (0, 5), value=False)
    assert torch.equal(rule(*wide, quota)[:, : score.shape[1]], commit)


@pytest.mark.parametrize("rule", [rule for rule, _ in CASES], ids=str)
def test_what_stands_at_unmasked_positions_is_never_read(rule):
    score, masked, quota = rows(7)
    poisoned = score.masked_fill(~masked, float("nan"))
    assert torch.equal(rule(poisoned, masked, quota), rule(score, masked, quota))


def test_schedule_shares_out_what_is_masked():
    for masked in (1, 7, 32):
        for steps in (1, 3, 7, 32, 50):
            shares = [schedule(masked, steps, step) for step in range(min(steps, masked))]
            assert sum(shares) == masked
            assert shares == sorted(shares, reverse=True)
            assert max(shares) - min(shares) <= 1
    assert schedule(1, 2, 1) == schedule(3, 4, 9) == 1  # masked again later


def test_credit_against_the_formula():
    rule, mask = Credit(), 4
    memory = torch.zeros(3, 5)
    written = [[0.0] * 5 for _ in range(3)]
    for seed in range(4):
        logits = 2 * torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        boosted, memory = rule.boost(logits, memory, mask)
        for i, row in enumerate(logits.double().tolist()):
            total = sum(map(math.exp, row))
            best = max(range(4), key=lambda token: row[token])
            written[i] = [0.8 * m for m in written[i]]
            written[i][best] += (math.exp(row[best]) / total) ** 0.2
            expected = [x + 0.7 * math.log(1 + m) for x, m in zip(row, written[i], strict=True)]
            assert boosted[i].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_rule_s_settings_are_those_of_the_sampler():
    given = {"threshold": 0.5, "factor": 2.0, "gamma": 0.3, "tau_low": 0.2, "entropy_threshold": 0.7, "seed": 7}
    made = {name: SamplerConfig(rule=name, **given).decode_rule for name in RULES}
    assert made["hierarchical"] == Hierarchical(threshold=0.5, tau_low=0.2)
    assert made["factor"] == Factor(factor=2.0)
    assert made["entropy_bound"] == EntropyBound(gamma=0.3)
    assert made["entropy_threshold"] == EntropyThreshold(entropy_threshold=0.7)
    assert made["credit"] == Credit(threshold=0.5)
    for name, rule in RULES.items():
        assert type(made[name]) is rule
        assert SamplerConfig(rule=name).decode_rule == rule()  # defaults stand in one place
        for setting, kind in rule.settings().items():  # rules that share a setting agree on it
            assert repr(kind) == repr(RULES[READ_BY[setting][0]].settings()[setting])
        assert hasattr(Signals, rule.score) or rule.score == "order"
    scores = {name: rule.score for name, rule in RULES.items() if rule.score != "confidence"}
    entropies = dict.fromkeys(("entropy", "entropy_bound", "entropy_threshold"), "entropy")
    assert scores == {"random": "order", "margin": "margin", **entropies}


def signals_of(p: list[list[float]]) -> Signals:
    table = torch.tensor(p)
    return Signals(table.argmax(-1), table, mask_id=None)


def test_edits_replace_by_another_token_above_the_threshold():
    signals = signals_of([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4], [0.8, 0.2], [0.7, 0.3]])
    current = torch.tensor([1, 0, 1, 1, 1])
    committed = torch.tensor([True, True, True, False, True])
    gone, token = edits(signals, current, committed, 0.7)
    assert gone.tolist() == [True, False, False, False, False]  # the last one equals the threshold
    assert token[gone].tolist() == [0]


def test_remasks_are_bounded():
    signals = signals_of([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.8, 0.2]])
    current = torch.tensor([1, 0, 1, 1])
    committed = torch.tensor([True, True, True, False])
    again = remasks(signals, current, committed, torch.tensor([0, 0, 1, 0]), 0.3)
    assert again.tolist() == [True, False, False, False]
