import io
import json

import pytest
from rich.console import Console

from dlm.bench.config import BenchConfig
from dlm.bench.finding import Finding, Table
from dlm.bench.report import Report, cell, show
from tests.refusals import refused

HEADINGS = {"name": "name", "speed": "tokens/s", "right": "right"}
TABLE = Table(title="T", headings=HEADINGS, rows=[{"name": "[b]a", "speed": 1234.5, "right": None}], text="words")


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
