import pytest

from dlm.evaluation.rate import Rate


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [  # Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_intervals_are_the_published_ones(hits, total, low, high):
    assert Rate(hits, total).interval == pytest.approx((low, high), abs=6e-5)


def test_ends_are_exact_and_nothing_is_unknown():
    assert Rate(0, 7).interval[0] == 0.0
    assert Rate(7, 7).interval[1] == 1.0
    nothing = Rate.of([])
    assert (nothing.value, nothing.interval, str(nothing)) == (None, (0.0, 1.0), "–")


def test_counts_and_text():
    rate = Rate.of([True, False, True, True])
    assert rate == Rate(3, 4)
    assert str(rate) == "75.0 % (30.1–95.4)"
    assert rate.to_dict() == {"hits": 3, "total": 4, "rate": 0.75, "low": rate.interval[0], "high": rate.interval[1]}
