"""Sudoku as a task for a denoiser: the stream of samples, the tokenizer, and grids as text. Knows nothing of models,
noise or batches. A grid is np.int8 (81,), row-major, 0 for an empty cell.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from dlm.data.sudoku_puzzles import (
    MAX_EMPTY,
    SPLITS,
    Progress,
    addressed,
    base_puzzles,
    generate_puzzles,
    make_puzzle,
    random_grid,
    split_of,
    symmetry_invariant,
)
from dlm.data.sudoku_solver import Grid, check_solution, find_clash, follows_rules, solutions
from dlm.errors import UserError

__all__ = [
    # solving
    "Grid",
    "solutions",
    "check_solution",
    "follows_rules",
    "find_clash",
    # puzzles
    "SPLITS",
    "MAX_EMPTY",
    "random_grid",
    "make_puzzle",
    "generate_puzzles",
    "base_puzzles",
    "split_of",
    "symmetry_invariant",
    # samples and text
    "SudokuStream",
    "scramble",
    "sudoku_tokenizer",
    "parse_puzzle",
    "grid_to_text",
    "EOS_ID",
    "MASK_ID",
]

BLOCK = 256  # samples are drawn this many at a time, which makes each cost microseconds


def _shuffled_lines(rng: np.random.Generator, n: int) -> NDArray[np.int64]:
    """(n, 9): orders of nine rows (or columns) that keep the three bands whole."""
    bands = np.argsort(rng.random((n, 3)), axis=1)
    within = np.argsort(rng.random((n, 3, 3)), axis=2)
    return (3 * bands[:, :, None] + within).reshape(n, 9)


def scramble(rng: np.random.Generator, pairs: Grid) -> Grid:
    """A random symmetry for each pair of grids (n, 2, 81): digits, rows, columns, bands, stacks, transpose."""
    n = len(pairs)
    digits = np.zeros((n, 10), np.int8)
    digits[:, 1:] = np.argsort(rng.random((n, 9)), axis=1) + 1
    cells = 9 * _shuffled_lines(rng, n)[:, :, None] + _shuffled_lines(rng, n)[:, None, :]
    flip = rng.random(n) < 0.5
    cells[flip] = cells[flip].transpose(0, 2, 1)
    moved = np.take_along_axis(pairs, cells.reshape(n, 1, 81), axis=2)
    return np.take_along_axis(digits, moved.reshape(n, 162), axis=1).reshape(n, 2, 81)


class SudokuStream:
    """Endless samples: a scrambled base puzzle with some holes filled in again. Its only state is a counter.

    Sample i is a function of (seed, split, i) and of the pool: input_ids is the whole solution, np.int32 (81,), and
    prompt_mask is True at the givens. The number of empty cells is uniform in `empty`, or all the puzzle has.
    """

    length = 81

    def __init__(
        self,
        seed: int = 0,
        split: str = "train",
        empty: tuple[int, int] = (20, 60),
        pool_size: int = 2000,
        pool_seed: int = 0,
        folder: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not 1 <= empty[0] <= empty[1] <= 81:
            raise UserError(f"{empty=}: give a range within 1 to 81 empty cells, smaller first")
        if pool_size < 1:
            raise UserError(f"{pool_size=}: a sudoku pool needs at least one base puzzle")
        self.seed, self.split, self.empty = seed, split, empty
        self.pool = base_puzzles(pool_size, split, pool_seed, folder, progress)
        self._next = 0
        self._block: tuple[int, NDArray[np.int32], NDArray[np.bool_]] | None = None

    def _draw(self, block: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        rng = addressed(self.seed, 2, self.split, block)
        pairs = scramble(rng, self.pool[rng.integers(len(self.pool), size=BLOCK)])
        wanted = rng.integers(self.empty[0], self.empty[1] + 1, size=(BLOCK, 1))
        luck = rng.random((BLOCK, 81)) + (pairs[:, 0] > 0)  # holes of the base puzzle come first, in random order
        rank = np.argsort(np.argsort(luck, axis=1), axis=1)
        return pairs[:, 1].astype(np.int32), (rank >= wanted) | (pairs[:, 0] > 0)

    def sample(self, index: int) -> dict[str, Any]:
        block, row = divmod(index, BLOCK)
        if self._block is None or self._block[0] != block:
            self._block = (block, *self._draw(block))
        _, grids, given = self._block
        return {"input_ids": grids[row].copy(), "prompt_mask": given[row].copy(), "index": index}

    def __iter__(self) -> "SudokuStream":
        return self

    def __next__(self) -> dict[str, Any]:
        self._next += 1
        return self.sample(self._next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = int(state["next"])


EOS_ID, MASK_ID = 0, 10
_LINES = "|+-'│┃┼╂╋─━═║├┤┬┴┌┐└┘╭╮╰╯"  # whatever a grid is usually drawn with, and grid_to_text's mark of a given
_EMPTY = "._0"


def sudoku_tokenizer() -> Tokenizer:
    """A token a cell: 0 is [EOS] (also padding), 1..9 the digits, 10 [MASK], which is what `.`, `_` and `0` stand for."""
    vocabulary = {"[EOS]": EOS_ID, **{str(d): d for d in range(1, 10)}, "[MASK]": MASK_ID}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    drawn = Regex("[\\s\\" + "\\".join(_LINES) + "]")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(drawn, ""), normalizers.Replace(Regex(f"[{_EMPTY}]"), "[MASK]")]
    )
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
                    f"sudoku line {number}, column {column}: {character!r} is not a digit 1-9 or one of '{_EMPTY}' (empty)"
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
