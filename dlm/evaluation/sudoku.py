"""Held-out Sudoku puzzles, and which models they can be put to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.errors import UserError
from dlm.sudoku.puzzles import generate_puzzles
from dlm.sudoku.solver import Grid
from dlm.sudoku.text import MASK_ID

if TYPE_CHECKING:
    from dlm.models.lm import LM

BANDS = ((30, 35), (36, 40), (41, 45), (46, 50), (51, 55))
"""Ranges of empty cells, each with a rate of its own."""


@dataclass(frozen=True, kw_only=True)
class Puzzles:
    """Held-out puzzles, each with exactly one solution; grids are (n, 81), 0 for an empty cell."""

    puzzles: Grid
    solutions: Grid

    def __len__(self) -> int:
        return len(self.puzzles)

    @property
    def empty(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Empty cells of each."""
        return (self.puzzles == 0).sum(1)

    def first(self, n: int) -> "Puzzles":
        """A subset that is the same for everything measured on it."""
        return Puzzles(puzzles=self.puzzles[:n], solutions=self.solutions[:n])


def heldout_puzzles(n: int = 1000, empty: tuple[int, int] = (BANDS[0][0], BANDS[-1][1]), seed: int = 0) -> Puzzles:
    """`n` puzzles of no symmetry class that training saw, their empty cells uniform in `empty`."""
    if n < 1:
        raise UserError(f"{n} puzzles: at least one is needed to measure anything")
    puzzles, solutions = generate_puzzles(n, empty, seed, "heldout")
    return Puzzles(puzzles=puzzles, solutions=solutions)


def is_sudoku_model(lm: "LM") -> bool:
    """Whether a model has a token a cell, as `dlm.sudoku.sudoku_tokenizer` has them."""
    return lm.mask_id == MASK_ID and lm.tokenizer is not None and lm.encode("123456789") == list(range(1, 10))
