"""Checks of filled texts, by which a request may be decoded again. To add one: a function here, and a line in `CHECKS`."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from dlm.data.lines import fault, parses
from dlm.sudoku.solver import follows_rules

Check = Callable[[Sequence[str], Sequence[str]], bool]
"""Whether a text is right that has these fills between these pieces, of which there is one more."""

SAMPLES = ("pass", "x", "if x:", "else:", "elif x:", "try:", "except x:", "x(", "x,", ":", "x:", "(", ")", "x)", "x):")
SAMPLES += ("[", "]", "{", "}", "x = [", "x = {", "x: x,", '"x"', "def x(", "@x", "finally:", "= x", "in", "+", "")
"""What may stand in a hole of a Python text, the frequent first."""
BEGUN = ("", "x(", "x = [", "x = {")
"""What a fragment may be within."""
CLOSING = {"(": ")", "[": "]", "{": "}"}
NOWHERE = "$"
"""What stands in no Python code, but may in its strings and comments."""
LINES, CHARACTERS = 60, 4000
"""On either side, by which fragments are judged: other requests wait meanwhile, whatever a prompt may hold."""
SLACK = 1
"""How many lines less a fill may leave than the best sample."""


def python(pieces: Sequence[str], fills: Sequence[str]) -> bool:
    """Whether the text is Python, as the running Python parses it.

    A text that some sample of Python makes parse is whole: fills pass if it parses with them, too. Another may be a
    fragment of a file, begin anywhere and end anywhere. Then the lines at which parsing stops are dropped at both ends,
    and the fills pass if they leave as many lines as samples of Python do. A text of which no sample leaves any passes:
    it is no Python. So does one whose holes are in a string or a comment.
    """
    if parses(_joined(pieces, fills)):
        return True
    if sum(map(len, pieces)) <= 2 * CHARACTERS and _whole(tuple(pieces)):
        return False
    before, after = pieces[0][-CHARACTERS:].split("\n"), pieces[-1][:CHARACTERS].split("\n")
    cut = ("\n".join(before[-LINES - 1 :]), *pieces[1:-1], "\n".join(after[: LINES + 1]))
    most = _most(cut)
    return most is None or any((_left(cut, fills, begun) or 0) >= most - SLACK for begun in BEGUN)


def python_line(pieces: Sequence[str], fills: Sequence[str]) -> bool:
    """`python` where each hole is for one line at most; it may begin with the break before that line."""
    return not any("\n" in fill.strip() for fill in fills) and python(pieces, fills)


def sudoku(pieces: Sequence[str], fills: Sequence[str]) -> bool:
    """Whether the text is a full 9×9 grid of Sudoku that keeps the rules."""
    cells = "".join(_joined(pieces, fills).split())
    full = len(cells) == 81 and cells.isascii() and cells.isdigit()
    return full and bool(follows_rules(np.array([int(cell) for cell in cells]))[0])


CHECKS: dict[str, Check] = {"python": python, "python_line": python_line, "sudoku": sudoku}


def _joined(pieces: Sequence[str], fills: Sequence[str]) -> str:
    return "".join(piece + fill for piece, fill in zip(pieces, (*fills, ""), strict=True))


@lru_cache(4096)
def _whole(pieces: tuple[str, ...]) -> bool:
    """Whether the text parses with one sample in all its holes.

    Of 2,000 windows of 256 tokens, cut out of files, 14 do, and all of these parse with what truly stood in them.
    """
    return any(parses(_joined(pieces, (sample,) * (len(pieces) - 1))) for sample in SAMPLES)


@lru_cache(4096)
def _most(pieces: tuple[str, ...]) -> int | None:
    """How many lines are left with the best sample in the holes; None where none is."""
    best = None
    lines = pieces[0].count("\n") + pieces[-1].count("\n")
    for begun, sample in product(BEGUN, SAMPLES):
        left = _left(pieces, (sample,) * (len(pieces) - 1), begun)
        if left is not None and (best is None or left > best):
            best = left
        if best is not None and best >= lines - 2:  # all but those that are cut
            break
    return best


def _left(pieces: Sequence[str], fills: Sequence[str], begun: str) -> int | None:
    """How many lines are left without those at which parsing stops, of a fragment within `begun`; None for none.

    A bracket that the last fill opens may still be open where the fragment ends: it is closed there, which counts as two
    lines less, for nearly anything fits between brackets.
    """
    head, tail = pieces[0].split("\n"), pieces[-1].split("\n")
    if not (any(map(str.strip, fills)) or head[-1].strip() or tail[0].strip()):
        return None  # a line left empty fits everywhere, and shows nothing
    first, last = 0, len(tail)  # lines head[first:] and tail[:last] are kept; the hole's own line always is
    middle = _joined(["", *pieces[1:-1], ""], fills)
    nowhere = [NOWHERE] * len(fills)
    closing, closed = _closing(fills[-1]), 0
    while True:
        lines = [*head[first:-1], *(head[-1] + middle).split("\n"), *tail[1:last]]
        before = [*_headers(lines, begun), *head[first:]]
        cut = ["\n".join(before), *pieces[1:-1], "\n".join([*tail[:last], *[closing] * closed])]
        row = fault(_joined(cut, fills))
        if row is None and not parses(_joined(cut, nowhere)):
            break
        kept, hole = len(head) - 1 - first, len(before)  # hole: the row of the first one, from 1
        within = hole + middle.count("\n")
        if row is None or row < hole:  # None: what is taken for a string has other strings' quotes
            gone = 1 if row is None else max(1, row - (hole - 1 - kept))
            if gone > kept:
                return None
            first += gone
        elif row > within:
            last = min(last - 1, row - within)
            if last < 1:
                return None
        elif closing and not closed:
            closed = 1
        elif first == 0 < kept:  # the first line may have been cut in its indentation
            first = 1
        else:
            return None
    if _tells(tail[1:]) and not _tells(tail[1:last]):
        return None  # nothing that follows is left to tell what fits
    return len(head) - 1 - first + last - 1 - 2 * closed


def _headers(lines: Sequence[str], begun: str) -> list[str]:
    """Lines that open the blocks which these lines are in, of indentations that later ones fall back to.

    The last of them is `begun` where there is one.
    """
    rows = [(len(line) - len(line.lstrip()), line.lstrip()) for line in lines if line.strip()]
    outer: dict[int, str] = {}
    least = rows[0][0] if rows else 0
    for depth, code in rows[1:]:
        if depth < least:
            least = depth
            outer[depth] = "try:" if code.startswith(("except", "finally")) else "if x:"
    if least > 0:
        outer[0] = "if x:"
    if begun:
        outer[max(outer, default=0)] = begun
    return [" " * depth + opens for depth, opens in reversed(outer.items())]


def _closing(fill: str) -> str:
    """The brackets that this leaves open, closed."""
    found = ""
    for character in fill:
        if character in CLOSING:
            found = CLOSING[character] + found
        elif found.startswith(character):
            found = found[1:]
    return found


def _tells(lines: Sequence[str]) -> bool:
    """Whether there is any code among these lines."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in lines)
