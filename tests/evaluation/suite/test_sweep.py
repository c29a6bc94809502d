"""Points of a sweep: the front, ways of decoding at equal quality, and the plot."""

import importlib.util
import math

import pytest

from dlm.evaluation.suite.plot import draw
from dlm.evaluation.suite.report import table
from dlm.evaluation.suite.sweep import best, by_way, groups, ways


def run(tpf, quality, task="t", bits=False, rule="margin", **way):
    metrics = {"tpf": tpf, "nfe": 1.0}
    if bits:
        metrics |= {"bits_per_byte": quality, "bits_error": 0.1}
    else:
        metrics["exact"] = {"rate": quality, "low": quality, "high": quality}
    row = {"model": "m", "task": task, "decoding": f"{rule} {way} {tpf}", "items": 9, "metrics": metrics}
    return row | {"measure": "bits_per_byte" if bits else "exact", "way": {"rule": rule, **way}}


MULTI = {"strategy": "multi_block"}
RUNS = [
    *(run(t, q) for t, q in ((1.0, 0.9), (3.0, 0.6), (2.0, 0.5))),
    *(run(t, q, **MULTI) for t, q in ((4.0, 0.7), (6.0, 0.5))),
    run(8.0, 0.9, cache="dual"),
]


def test_ways_at_equal_quality():
    (group,) = groups({"runs": RUNS})
    assert list(by_way(group)) == ["plain", "multi_block", "dual"]
    block, multi, dual = ways(group)
    assert block == {"way": "plain", "decodings": 3, "best": 0.9, "tpf": 1.0, "aup": pytest.approx(90.0)}
    assert (multi["ratios"], multi["matched"], multi["of"]) == ([4 / 3, 4 / 3], 1, 2)
    assert (dual["ratios"], dual["matched"], dual["of"]) == ([8 / 3, 8.0], 2, 2)
    assert [point.tpf for point in best(group)] == [8.0]
    assert multi["aup"] == pytest.approx(4 * 70)  # at 6 tokens a forward it is more than 5 points under the first
    flat = ways(groups({"runs": [*RUNS, run(3.0, 0.7, cache="prefix"), run(5.0, 0.7, cache="prefix")]})[0])[-1]
    assert flat["aup"] == pytest.approx(5 * 70)
    close = ways(groups({"runs": [*RUNS, run(3.0, 0.7, cache="prefix"), run(5.0, 0.66, cache="prefix")]})[0])[-1]
    weighed = [q * math.exp(-3 * (1 - q / 90)) for q in (70, 66)]  # 90 is the best of all ways
    assert close["aup"] == pytest.approx(3 * 70 + 2 * sum(weighed) / 2)
    nines = [run(2.0, 0.9, blocks="9"), run(5.0, 0.9, blocks="9", **MULTI)]
    rows = ways(groups({"runs": [*RUNS, *nines]})[0])[3:]
    assert [row["way"] for row in rows] == ["blocks of 9", "blocks of 9, multi_block"]
    assert "of" not in rows[0] and rows[1]["ratios"] == [2.5, 2.5]
    text = table({"runs": RUNS})
    assert "1.33–1.33×, at 1 of 2 points" in text and "2.67–8.00×, at 2 of 2 points" in text
    assert "never as good" in table({"runs": [*RUNS[:1], run(9.0, 0.1, **MULTI)]})


def test_fewer_bits_are_better():
    runs = [run(1.0, 2.0, bits=True), run(2.0, 2.0, bits=True, **MULTI), run(2.0, 3.0, bits=True, cache="dual")]
    (group,) = groups({"runs": runs})
    assert [point.run for point in best(group)] == [runs[1]]
    rows = ways(group)
    assert [row["aup"] for row in rows] == [None] * 3 and rows[1]["ratios"] == [2.0, 2.0] and rows[2]["ratios"] is None


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plot`")
@pytest.mark.filterwarnings("default")
def test_the_plots(tmp_path):
    assert draw({"runs": []}, tmp_path / "a.png") is None
    for runs in (RUNS, RUNS[:1], [*RUNS, run(1.0, 2.0, "u", True), run(2.0, 2.5, "u", True, draft="ngram")]):
        assert draw({"runs": runs}, tmp_path / "a.png") == tmp_path / "a.png"
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
