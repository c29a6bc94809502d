"""Checks of filled texts: what a text with these fills is held to, wherever it was cut out of its file."""

import ast
import random

import pytest

from dlm.data.lines import code_rows, fault
from dlm.inference import checks
from dlm.inference.checks import CHECKS

check = CHECKS["python"]
MODULE = '''"""Reads tables.

Rows are lists; a cell's text isn't changed (see "cells").
"""

import csv
from pathlib import Path


class Table:
    """Some rows
    of cells."""

    kinds = {"a": int, "b": float}

    def __init__(self, path, *, limit=None):
        self.path = Path(path)
        self.rows = []
        with open(path) as file:
            for number, row in enumerate(csv.reader(file)):
                if limit is not None and number >= limit:
                    break
                else:
                    self.rows.append(
                        [cell.strip() for cell in row],
                    )

    @property
    def width(self):
        """Cells of the
        first row, which isn't checked."""
        try:
            return len(self.rows[0])
        except IndexError:
            return 0
        finally:
            self.seen = True

    def column(self, name):
        # its cells, as "kinds" has them
        kind = self.kinds.get(name, str)
        found = []
        for row in self.rows:
            if not row:
                continue
            elif len(row) > 1:
                found.append(kind(row[0]))
        return found


def total(path):
    table = Table(path, limit=10)
    numbers = [
        float(cell)
        for row in table.rows
        for cell in row
    ]
    text = """
    of several ( lines
    """
    return sum(numbers) + len(text)
'''


def fragments():
    """Every line of code of the module, in windows of many sizes: what stands before and after it, cut anywhere."""
    draw, start = random.Random(0), 0
    rows = code_rows(MODULE)
    for number, line in enumerate(MODULE.split("\n"), start=1):
        code = line.strip()
        begin = start + len(line) - len(line.lstrip())
        if number in rows:
            for _ in range(6):
                before, after = draw.randrange(20, 500), draw.randrange(20, 500)
                yield MODULE[max(0, begin - before) : begin], code, MODULE[begin + len(code) :][:after]
        start += len(line) + 1


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_a_whole_text_is_what_the_parser_says():
    head, tail = "def f(x):\n    ", "\n    return x\n"
    for fill in ("pass", "x = [", "if x:", "return x", "y = x +", '"""a\n    b"""', "for y in x: pass", ")", ""):
        assert check((head, tail), (fill,)) is parses(head + fill + tail)
    tail = "\n    return x == 0\n"
    for fill in (
        "return x == 0\nelse:",
        "yield x\nexcept IndexError:",
        "if x:\n        x = 1",
        "if x:\n    x = 1",
        "pass",
    ):
        assert check((head, tail), (fill,)) is parses(head + fill + tail)
    middle = " = x\n    return "
    assert check((head, middle, "\n"), ("y", "y + 1")) and not check((head, middle, "\n"), ("y", "y +"))


def test_fragments_pass_as_they_were_and_fail_broken():
    """Nearly all, that is: of a window that begins in an open bracket or ends in one, too little can be told."""
    told, right, broken, caught = 0, 0, 0, 0
    for before, line, after in fragments():
        told += 1
        right += check((before, after), (line,))
        for other in (line + ")", line[:-1] + "(", line + " =", "] " + line, line + "\n  x"):
            if not parses(MODULE.replace(line, other, 1)):
                broken += 1
                caught += not check((before, after), (other,))
    assert told > 200 and right / told > 0.94, (right, told)
    assert broken > 500 and caught / broken > 0.8, (caught, broken)


def test_a_line_that_opens_a_block_is_held_to_what_follows():
    pieces = ("    total = 0\n    ", "\n        total += 1\n    return total\n\ndef g(")
    assert check(pieces, ("for x in y:",)) and check(pieces, ("if x:",))
    assert not check(pieces, ("x = 1",)) and not check(pieces, ("for x in y",))


@pytest.mark.parametrize(
    "pieces",
    [
        ("Dear reader, these are ", " words and no program.\n"),
        ('def f():\n    """It is ', ' that\'s all."""\n    return 1\n'),
        ("def f():\n    return 1  # because ", "\n"),
        ("<p>", "</p>\n<p>second</p>\n"),
    ],
)
def test_what_is_no_code_passes(pieces):
    assert all(check(pieces, (fill,)) for fill in ("x", "it's", "(", "two words"))


def test_an_indented_fragment_may_fall_back_and_go_on():
    before = "            if row:\n                count += 1\n            "
    after = "\n        return count\n\n    def other(self):\n        pass\n"
    assert check((before, after), ("else:\n                count -= 1",))
    assert check((before, after), ("count = max(count, 1)",))
    assert not check((before, after), ("else:",)) and not check((before, after), ("count = max(count, 1",))


@pytest.mark.parametrize("unit", ["x[0]", "+1", "lambda: ", "(", "x\n"])
def test_little_of_a_long_text_is_parsed(unit, monkeypatch):
    """Prompts come from anywhere, and other requests wait while one is judged."""
    parsed = []
    monkeypatch.setattr(checks, "fault", lambda text: (parsed.append(len(text)), fault(text))[1])
    check((f"{9000 * unit}\n    ", f"\n{9000 * unit}"), ("x = (",))
    assert max(parsed) < 3 * checks.CHARACTERS and sum(parsed) < 500 * checks.CHARACTERS


def test_a_line_is_one_line():
    pieces, check = ("def f(x):\n    ", "\n    return x\n"), CHECKS["python_line"]
    assert check(pieces, ("x = 1",)) and check(("def f(x):", "\n    return x\n"), ("\n    x = 1",))
    assert not check(pieces, ("x = 1\n    y = 2",)) and not check(pieces, ("x = ",))


def test_a_sudoku_keeps_the_rules():
    rows = ["534678912", "672195348", "198342567", "859761423", "426853791"]
    rows += ["713924856", "961537284", "287419635", "345286179"]
    grid, check = "".join(rows), CHECKS["sudoku"]
    assert check((grid[:4], grid[9:]), (grid[4:9],)) and check(("\n".join(rows) + "\n",), ())
    for wrong in ("78912"[::-1], "7891", "78910", "7891²", ""):
        assert not check((grid[:4], grid[9:]), (wrong,))
