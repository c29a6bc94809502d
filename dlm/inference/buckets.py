"""The sizes that a recorded step's arrays are rounded up to: all steps of the same sizes share one graph."""

from dataclasses import dataclass

import numpy as np

from dlm.inference.decide import Round
from dlm.inference.layout import Layout
from dlm.inference.memory import RECORDED
from dlm.inference.recipe import Recipe

ROWS = RECORDED
"""Steps of more rows than this keep a GPU busy longer than the host needs to launch them."""
FEW = 64
"""Up to so many rows a product costs what reading its weights costs: rows of the head are not counted more finely."""
POSITIONS = 1024
"""Page tables are sized for so many positions, or twice as many, and so on."""


@dataclass(frozen=True)
class Bucket:
    """The sizes of a step's arrays, rounded up, and what is decided in it."""

    recipe: Recipe | None
    """None: the step ends with hidden states."""
    rows: int
    spans: int
    longest: int
    """Rows of the largest span."""
    pages: int
    states: int
    """Rows whose states are needed."""
    asked: int = 0
    requests: int = 0
    columns: int = 0
    tapped: tuple[int, ...] = ()
    """Layers whose outputs are kept."""
    late: bool = False
    """Whether the device alone knows some of the tokens."""

    @classmethod
    def of(
        cls, layout: Layout, output_rows: np.ndarray, round_: Round | None, tapped: tuple[int, ...], late: bool
    ) -> "Bucket | None":
        """That of a step; None where it is too large for any."""
        rows = rounded(layout.rows, 16)
        if rows > ROWS:
            return None
        longest, positions = layout.most
        size = layout.pool.page_size
        pages = doubled(positions, max(POSITIONS, size)) // size
        states = min(rows, doubled(len(output_rows), FEW))
        sizes = rows, doubled(len(layout)), doubled(longest, 16), pages, states
        if round_ is None:
            return cls(None, *sizes, tapped=tapped, late=late)
        asked = states if round_.states[0] is None else min(rows, doubled(len(round_.at), FEW))
        requests, columns = map(doubled, round_.shape)
        return cls(round_.recipe, *sizes, asked, requests, columns, tapped, late)

    def blank(self) -> dict[str, np.ndarray]:
        """Its arrays with nothing in them: what padding holds. `ids` is the first that changes with each step."""
        n, b = self.rows, self.spans
        found = {"positions": np.zeros(n, np.int64), "slots": np.full(n, -1)}
        found |= {"starts": np.zeros(b + 1, np.int32), "visible": np.zeros(b, np.int32)}
        found |= {"tables": np.zeros((b, self.pages), np.int32), "block_lengths": np.zeros(b, np.int32)}
        found |= {"ids": np.zeros(n, np.int64), "rows": np.zeros(self.states, np.int64)}
        if self.late:
            found["late"] = np.zeros(n, np.int64)
        if (recipe := self.recipe) is None:
            return found
        grid, listed = (self.requests, self.columns), np.zeros(self.asked, np.int64)
        found |= {"at": np.full(self.asked, self.requests * self.columns)}  # past the grid's end: dropped
        found |= {"masks": np.zeros(grid, bool), "quota": np.zeros(self.requests, np.int64)}
        if recipe.cfg_scale > 0:
            found |= {"rows0": listed, "rows1": listed}
        if recipe.several:
            found["front"] = np.zeros(grid, bool)
        if recipe.draws:
            found |= dict.fromkeys(("seed", "sample", "step", "position"), listed)
        if recipe.revises:
            found |= {"current": listed, "committed": listed.astype(bool), "times": listed}
        return found


def counted(output_rows: np.ndarray, round_: Round | None) -> tuple:
    """All of a step, beside its layout, that a bucket's sizes follow from."""
    states = doubled(len(output_rows), FEW)
    if round_ is None:
        return (states,)
    return states, round_.recipe, round_.shape, round_.states[0] is None or doubled(len(round_.at), FEW)


def doubled(number: int, least: int = 1) -> int:
    """The first of least, 2 least, 4 least … that is not smaller."""
    while least < number:
        least *= 2
    return least


def rounded(number: int, least: int) -> int:
    """The same with the sizes half-way between: a third more than needed at most."""
    high = doubled(number, least)
    between = high * 3 // 4
    return between if high > least and between >= number else high
