"""Paired comparisons, fronts and AUP against brute force and hand-made cases."""

from itertools import product

import numpy as np
import pytest

from dlm.evaluation.suite.again import differences
from dlm.evaluation.suite.compare import aup, front, mcnemar, paired


def test_mcnemar_is_the_share_of_coins_that_split_as_unevenly():
    for better, worse in product(range(6), range(6)):
        total = better + worse
        splits = [sum(coins) for coins in product((0, 1), repeat=total)]
        as_uneven = [abs(s - total / 2) >= abs(better - total / 2) for s in splits]
        assert mcnemar(better, worse) == pytest.approx(min(1.0, np.mean(as_uneven)))


def test_paired_differences():
    ours, theirs = [1.0, 1.0, 0.0, 1.0] * 25, [1.0, 0.0, 0.0, 1.0] * 25
    found = paired(ours, theirs)
    assert (found["difference"], found["better"], found["worse"]) == (0.25, 25, 0)
    error = np.std(np.array(ours) - theirs) / 10
    assert (found["low"], found["high"]) == (
        pytest.approx(0.25 - 1.96 * error, abs=0.02),
        pytest.approx(0.25 + 1.96 * error, abs=0.02),
    )
    assert found["p"] == pytest.approx(2 * 0.5**25)
    assert paired(ours, ours)["p"] == 1.0 and "p" not in paired([0.5, 1.0], [0.2, 1.0])
    draw = np.random.default_rng(0)
    bits, size, rival = draw.normal(9, 3, 40), draw.integers(5, 40, 40), draw.integers(5, 40, 40)
    found = paired(list(bits), list(bits), sizes=(list(size), list(rival)))
    assert found["difference"] == pytest.approx(bits.sum() / size.sum() - bits.sum() / rival.sum()) and "p" not in found
    assert found["low"] < found["difference"] < found["high"]
    assert paired([1.0], [0.0]) == {"difference": 1.0, "items": 1, "better": 1, "worse": 0, "p": 1.0}


def test_the_front_is_what_no_other_beats():
    rng = np.random.default_rng(0)
    points = [tuple(p) for p in rng.integers(0, 5, (30, 2)).astype(float)]
    beaten = [any(a >= c and b >= d and (a, b) != (c, d) for a, b in points) for c, d in points]
    assert front(points) == [i for i, b in enumerate(beaten) if not b]


def test_aup_by_hand():
    assert aup([]) is None
    assert aup([(1.0, 0.8)]) == pytest.approx(80)
    assert aup([(1.0, 0.8), (3.0, 0.8)]) == pytest.approx(80 + 2 * 80)
    weight = np.exp(-3 * (1 - 78 / 80))
    assert aup([(2.0, 0.78), (1.0, 0.8)]) == pytest.approx(80 + (80 + 78 * weight) / 2)
    assert aup([(1.0, 0.8), (9.0, 0.7)]) == pytest.approx(80)  # too bad to count


def test_differences_name_the_place():
    old, new = {"a": [1, {"b": 2}], "c": 3}, {"a": [1, {"b": 4}], "d": 5}
    assert differences(old, new) == ["a[1].b: 2 → 4", "c: 3 → null", "d: null → 5"]
    assert differences(old, old) == []
