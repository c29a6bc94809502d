import pytest

from dlm.data.config import DataConfig
from dlm.data.lines import code_rows, heldout_lines, parses, small_functions
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


def test_small_functions_are_texts_by_themselves():
    text = "class A:\n    def b(self):\n        x = 1\n        return x\n\n    @wraps\n    def c(self):\n        y = 1\n        return y\n"
    text += "\n    def short(self): pass\n\n    def text(self):\n        return '''\nleft\n'''\n"
    assert list(small_functions(text)) == ["def b(self):\n    x = 1\n    return x\n"]
    assert not list(small_functions("def broken(:\n"))
    assert not list(small_functions(text, (20, 30)))
