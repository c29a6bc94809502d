import importlib.util
import io
import json

import numpy as np
import pytest
from rich.console import Console

from dlm.bench.config import BenchConfig
from dlm.bench.finding import Finding, Point, Table
from dlm.bench.front import equal_quality, front
from dlm.bench.report import Report, cell, show
from tests.refusals import refused

HEADINGS = {"name": "name", "speed": "tokens/s", "right": "right"}
TABLE = Table(title="T", headings=HEADINGS, rows=[{"name": "[b]a", "speed": 1234.5, "right": None}], text="words")
POINTS = [
    Point(panel="p", facet="f", series="a", kind="k", label="a 1", tpf=2.0, quality=0.5, low=0.4, high=0.6),
    Point(panel="p", facet="g", series="a", kind="l", label="a 2", tpf=1.0, quality=0.9, low=0.8, high=0.95),
    Point(panel="q", facet="f", series="b", kind="k", label="b", tpf=1.0, quality=3, low=2, high=4, rises=False),
]


def report(tmp_path, **output) -> Report:
    return Report(BenchConfig.model_validate({"output": {"file": tmp_path / "b.json", **output}}), "a machine")


def test_a_table_is_shown_as_written():
    stream = io.StringIO()
    show(Console(file=stream, width=80), Finding(values={}, tables=[TABLE], notes=["note [x]"]))
    text = stream.getvalue()
    for word in ("T", "tokens/s", "[b]a", "1,234", "–", "words", "note [x]"):
        assert word in text


CELLS = {None: "–", True: "yes", 3: "3", 12345: "12,345", 0.12345: "0.123", 12.345: "12.35", 1234.5: "1,234", "x": "x"}


@pytest.mark.parametrize("value", CELLS)
def test_cells(value):
    assert cell(value) == CELLS[value]


def test_the_file_grows_with_every_measurement(tmp_path):
    made = report(tmp_path)
    made.add(Finding(values={"blockinfer": {"throughput": 1.0}}))
    first = json.loads((tmp_path / "b.json").read_text())
    made.add(Finding(values={"load": [1]}))
    second = json.loads((tmp_path / "b.json").read_text())
    assert first.keys() == {"blockinfer", "machine", "config"}
    assert second.keys() == {"blockinfer", "load", "machine", "config"}
    assert second["machine"] == "a machine" and second["config"]["model"]["name"] == "pico"
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]  # nothing half-written beside it


def test_tables_in_markdown(tmp_path):
    made = report(tmp_path, markdown=True)
    made.add(Finding(values={}, tables=[TABLE]))
    made.add(Finding(values={}, tables=[TABLE]))
    lines = (tmp_path / "b.md").read_text().splitlines()
    assert lines.count("## T") == 2 and lines.count("words") == 2
    assert [word.strip() for word in lines[2].strip("|").split("|")] == ["name", "tokens/s", "right"]
    assert [word.strip() for word in lines[4].strip("|").split("|")] == ["[b]a", "1,234", "–"]


def test_a_folder_in_place_of_the_file(tmp_path):
    (tmp_path / "b.json").mkdir()
    refused("cannot be written", report, tmp_path)


def test_nothing_is_drawn_unasked(tmp_path):
    for output in ({"plot": False}, {"file": None}):
        made = report(tmp_path, **output)
        made.add(Finding(values={}, points=POINTS))
        assert made.plot() is None
    assert report(tmp_path).plot() is None  # no points


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plot`")
@pytest.mark.filterwarnings("default")
def test_the_plot(tmp_path):
    made = report(tmp_path)
    made.add(Finding(values={}, points=POINTS))
    assert made.plot() == tmp_path / "b.png"
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def point(tpf: float, quality: float, facet: str = "block", rises: bool = True, kind: str = "none") -> Point:
    label = f"{facet} {tpf:g}"
    sure = {"quality": quality, "low": quality, "high": quality, "rises": rises}
    return Point(panel="p", facet=facet, series="rule", kind=kind, label=label, tpf=tpf, **sure)


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
