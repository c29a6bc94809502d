"""Endless Sudoku samples for training: puzzles of a pool under random symmetries."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import UserError
from dlm.sudoku.puzzles import addressed, base_puzzles
from dlm.sudoku.solver import Grid

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


class SudokuStream(Iterator[dict[str, Any]]):
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
        folder: Path | None = None,
    ) -> None:
        if not 1 <= empty[0] <= empty[1] <= 81:
            raise UserError(f"{empty=}: give a range within 1 to 81 empty cells, smaller first")
        if pool_size < 1:
            raise UserError(f"{pool_size=}: a sudoku pool needs at least one base puzzle")
        self.seed, self.split, self.empty = seed, split, empty
        self.pool = base_puzzles(pool_size, split, folder=folder)
        self._next = 0
        self._block: tuple[int, NDArray[np.int32], NDArray[np.bool_]] | None = None

    def _draw(self, block: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        rng = addressed(self.seed, 2, self.split, block)
        pairs = scramble(rng, self.pool[rng.integers(len(self.pool), size=BLOCK)])
        holes = rng.integers(self.empty[0], self.empty[1] + 1, size=(BLOCK, 1))
        order = rng.random((BLOCK, 81)) + (pairs[:, 0] > 0)  # holes of the base puzzle come first, in random order
        rank = np.argsort(np.argsort(order, axis=1), axis=1)
        return pairs[:, 1].astype(np.int32), (rank >= holes) | (pairs[:, 0] > 0)

    def sample(self, index: int) -> dict[str, Any]:
        block, row = divmod(index, BLOCK)
        if self._block is None or self._block[0] != block:
            self._block = (block, *self._draw(block))
        _, grids, given = self._block
        return {"input_ids": grids[row].copy(), "prompt_mask": given[row].copy(), "index": index}

    def __next__(self) -> dict[str, Any]:
        self._next += 1
        return self.sample(self._next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = int(state["next"])
