"""Sudoku as tokens and as text: a token a cell. A grid is np.int8 (81,), row by row, 0 for an empty cell."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from dlm.errors import UserError
from dlm.sudoku.solver import Grid, find_clash

EOS_ID, MASK_ID = 0, 10
_LINES = "|+-'│┃┼╂╋─━═║├┤┬┴┌┐└┘╭╮╰╯"  # characters of drawn grids; ' marks givens
_EMPTY = "._0"


def sudoku_tokenizer() -> Tokenizer:
    """A token a cell: 0 is [EOS] (also padding), 1..9 the digits, 10 [MASK], which is what `.`, `_` and `0` stand for."""
    vocabulary = {"[EOS]": EOS_ID, **{str(d): d for d in range(1, 10)}, "[MASK]": MASK_ID}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    drawn = Regex("[\\s\\" + "\\".join(_LINES) + "]")
    replaced = [normalizers.Replace(drawn, ""), normalizers.Replace(Regex(f"[{_EMPTY}]"), "[MASK]")]
    tokenizer.normalizer = normalizers.Sequence(replaced)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\[MASK\]|\[EOS\]|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["[EOS]", "[MASK]"])
    return tokenizer


def parse_puzzle(text: str) -> Grid:
    """A puzzle from text: digits, with `.`, `_`, `0` or [MASK] for an empty cell; spaces and box lines are ignored."""
    cells: list[int] = []
    ends: list[int] = []
    for number, line in enumerate(text.replace("[MASK]", ".     ").splitlines(), start=1):
        for column, character in enumerate(line, start=1):
            if character in _EMPTY:
                cells.append(0)
            elif character in "123456789":
                cells.append(int(character))
            elif character not in _LINES and not character.isspace():
                raise UserError(
                    f"sudoku line {number}, column {column}: {character!r} is no digit from 1 to 9 and not empty ('{_EMPTY}')"
                )
        ends.append(len(cells))
    if len(cells) != 81:
        widths = [b - a for a, b in pairwise([0, *ends]) if b > a]
        odd = next((f", row {r} has {w}" for r, w in enumerate(widths, start=1) if len(widths) > 1 and w != 9), "")
        raise UserError(f"sudoku has {len(cells)} cells{odd}; it needs 81, nine rows of nine, '.' for an empty cell")
    puzzle = np.array(cells, np.int8)
    if clash := find_clash(puzzle):
        places = " and ".join(f"row {c // 9 + 1}, column {c % 9 + 1}" for c in clash)
        raise UserError(f"sudoku has {cells[clash[0]]} twice where it may stand once: {places}; change one of them")
    return puzzle


def grid_to_text(grid: NDArray[Any], given: NDArray[np.bool_] | None = None, color: bool = False) -> str:
    """Rows with box lines, anything but 1..9 as a dot. Givens are bold in color, primed without; parse_puzzle reads both plain forms."""
    rows = []
    for r in range(9):
        shown = []
        for c in range(9 * r, 9 * r + 9):
            character = str(int(grid[c])) if 1 <= grid[c] <= 9 else "."
            marked = given is not None and bool(given[c])
            if color:
                shown.append(f"\x1b[1m{character}\x1b[0m" if marked else f"\x1b[36m{character}\x1b[0m")
            else:
                shown.append(character + ("'" if marked else " " if given is not None else ""))
        rows.append(" │ ".join(" ".join(shown[k : k + 3]) for k in (0, 3, 6)))
    wide = 8 if given is not None and not color else 5
    rule = "─┼─".join(["─" * wide] * 3)
    return "\n".join([*rows[:3], rule, *rows[3:6], rule, *rows[6:]])
