"""Fronts against a brute-force search; equal quality on hand-made points."""

import numpy as np
import pytest

from dlm.bench.finding import Point
from dlm.bench.front import equal_quality, front


def point(tpf: float, quality: float, facet: str = "block", rises: bool = True, kind: str = "none") -> Point:
    label = f"{facet} {tpf:g}"
    return Point(
        panel="p",
        facet=facet,
        series="rule",
        kind=kind,
        label=label,
        tpf=tpf,
        quality=quality,
        low=quality,
        high=quality,
        rises=rises,
    )


@pytest.mark.parametrize("rises", [True, False])
def test_no_point_beats_the_front(rises):
    draw = np.random.default_rng(0)
    points = [point(*pair, rises=rises) for pair in draw.integers(0, 8, (40, 2)).tolist()]
    sign = 1 if rises else -1

    def beats(a: Point, b: Point) -> bool:
        x, y = (a.tpf, sign * a.quality), (b.tpf, sign * b.quality)
        return x != y and x[0] >= y[0] and x[1] >= y[1]

    expected = {(p.tpf, p.quality) for p in points if not any(beats(q, p) for q in points)}
    found = front(points)
    assert {(p.tpf, p.quality) for p in found} == expected
    assert [p.tpf for p in found] == sorted({p.tpf for p in found}, reverse=True)


def test_the_strategies_at_equal_quality():
    single = [point(1, 0.9), point(3, 0.6), point(2, 0.5)]
    multi = [point(4, 0.7, "multi_block"), point(6, 0.5, "multi_block")]
    table = equal_quality([*single, *multi, point(9, 1.0, "whole"), point(8, 0.9, kind="dual")])
    assert table is not None
    assert [row["block"] for row in table.rows] == [1, 3]
    assert "multi_block" not in table.rows[0]
    assert (table.rows[1]["multi_block"], table.rows[1]["ratio"]) == (4, 1.333)
    assert table.rows[1]["multi_block_way"] == "multi_block 4"


def test_lower_may_be_better():
    table = equal_quality([point(1, 2.0, rises=False), point(2, 2.0, "multi_block", rises=False)])
    assert table is not None and [row["ratio"] for row in table.rows] == [2.0]


def test_nothing_to_compare():
    assert equal_quality([]) is None
    assert equal_quality([point(1, 1.0), point(2, 1.0, "whole")]) is None
