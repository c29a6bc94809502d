import gzip
import json

import pytest

from dlm.data.config import DataConfig
from dlm.evaluation.lines import LineTask, code_rows, heldout_lines, parses, read_tasks
from tests.refusals import refused

SOURCE = '''"""A docstring
of two lines."""
import os  # 3

# a comment
TEXT = """one
x = 2
"""
def area(r):
    "One line of text."
    return 3.14 * (
        r ** 2)

@wraps
class A: pass
'''


def test_lines_of_code_are_told_from_text():
    assert code_rows(SOURCE) == {3, 9, 11, 12, 14, 15}
    assert code_rows("x = f'''{a\n}'''\ny = 1\n") == {3}
    assert code_rows("f'{a} {f\"{b}\"}'\ny = f'{a}'\n") == {2}
    assert code_rows("x = '''\n") == set()


@pytest.mark.parametrize(("text", "expected"), [("x = '\\d'\n", True), ("x = (\n", False), ("x\0", False), ("", True)])
def test_parsing(text, expected):
    assert parses(text) is expected


def test_tasks_are_lines_with_context(tmp_path):
    body = "".join(f"def function_{i}(x):\n    return x * {i}  # times\n\n" for i in range(40))
    (tmp_path / "good.py").write_text(body)
    (tmp_path / "broken.py").write_text(body + "def\n")
    data = DataConfig(source="text", paths=(str(tmp_path / "*.py"),), heldout_paths=(str(tmp_path / "*.py"),))
    tasks = heldout_lines(data, 1000, context=100)
    assert {t.filled(t.line) for t in tasks} == {body}
    assert all(len(t.prefix) >= 100 and len(t.suffix) >= 100 for t in tasks)
    assert all(t.line == t.line.strip() and 8 <= len(t.line) <= 100 for t in tasks)
    assert any(t.prefix.endswith("\n    ") and t.line.startswith("return x *") for t in tasks)
    assert len(tasks) == len({t.name for t in tasks})
    assert heldout_lines(data, 5, seed=1, context=100) == heldout_lines(data, 5, seed=1, context=100)
    assert heldout_lines(data, 5, seed=1, context=100) != heldout_lines(data, 5, seed=2, context=100)
    refused("no line of the held-out split", heldout_lines, data, context=10_000)
    refused('data.source = "sudoku"', heldout_lines, DataConfig(source="sudoku"))


RECORD = {"task_id": "SingleLine/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n"}
RECORD |= {"suffix": "y = 1\n"}


@pytest.mark.parametrize("zipped", [False, True])
def test_benchmark_files(tmp_path, zipped):
    text = (json.dumps(RECORD) + "\n\n").encode()
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(gzip.compress(text) if zipped else text)
    task = LineTask(name="SingleLine/0", prefix="def f(x):\n", line="    return x", suffix="\ny = 1\n")
    assert read_tasks(file) == [task]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no task"),
        ("{}", "line 1: `prompt` is missing"),
        ("[1]", "`prompt` is missing"),
        ("{", "line 1 is not JSON"),
        (json.dumps({**RECORD, "canonical_solution": "a\nb\n"}), "has 2 lines: use the single-line set"),
        (json.dumps({**RECORD, "suffix": 3}), "`suffix` is missing or no string"),
    ],
)
def test_bad_benchmark_files(tmp_path, text, message):
    file = tmp_path / "tasks.jsonl"
    file.write_text(text)
    refused(message, read_tasks, file)


def test_missing_and_broken_files(tmp_path):
    refused("cannot be read", read_tasks, tmp_path / "none.jsonl")
    (tmp_path / "torn.gz").write_bytes(gzip.compress(b"{}" * 100)[:20])
    refused("cannot be read", read_tasks, tmp_path / "torn.gz")
