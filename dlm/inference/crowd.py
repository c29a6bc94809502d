"""Rounds of plain requests: what `decide.Round` asks of each request is here read from `Canvases`, for all at once."""

import numpy as np

from dlm.inference.canvases import Canvases, Commits
from dlm.inference.decide import Round, recipe_of
from dlm.inference.layout import Layout
from dlm.inference.sequence import Sequence

NEVER = 1 << 62
"""Stands for an attention block without an end: no key is ever final."""


class Crowd:
    """Plain requests of one kind, and what stays the same of them from step to step."""

    def __init__(self, asked: list[Sequence], numbers: list[int], canvases: Canvases) -> None:
        """`numbers` say which of those asked they are."""
        self.seqs, self.numbers, self.canvases = [asked[number] for number in numbers], np.array(numbers), canvases
        self.recipe, _ = recipe_of(self.seqs[0].kind, several=False, confident=False, topk=0)
        self.places = np.array([canvases.places[seq] for seq in self.seqs])
        self.offsets = canvases.offsets[self.places][:, None]
        self.blocks = np.array([seq.attention_block or NEVER for seq in self.seqs])
        self._grid: tuple[Layout, bytes, Grid] | None = None
        self.seeds = np.array([seq.request.seed for seq in self.seqs], np.int64)
        self.samples = np.array([seq.request.sample for seq in self.seqs], np.int64)

    def grid(self, layout: Layout, starts: np.ndarray) -> "Grid":
        """Where all stand now: as at the step before, unless a block was opened since. `starts` are as in `Grid`."""
        opened = self.canvases.opened[self.places]
        told = opened.tobytes()
        if self._grid is None or self._grid[0] is not layout or self._grid[1] != told:
            self._grid = layout, told, Grid(self, opened, layout, starts)
        return self._grid[2]


class Grid:
    """Columns of a crowd's open blocks, (requests, columns), their places, and the rows of a layout that predict them."""

    def __init__(self, crowd: Crowd, opened: np.ndarray, layout: Layout, starts: np.ndarray) -> None:
        """`starts` are the first rows of all requests that are asked."""
        self.first, self.end, steps, self.opened = opened.T
        widths = self.end - self.first
        self.shape = len(widths), int(widths.max())
        self.share, self.rest = widths // steps, widths % steps
        columns = self.first[:, None] + np.arange(self.shape[1])
        self.inside = None if (widths == self.shape[1]).all() else columns < self.end[:, None]
        """Which columns are one of a block; None: all."""
        self.where = np.minimum(columns + crowd.offsets, len(crowd.canvases.tokens) - 1)
        own, shift = starts[crowd.numbers], crowd.seqs[0].shift
        rows = np.maximum(columns - shift, 0) + (own - layout.host_positions[own])[:, None]
        self.columns, self.rows = columns.reshape(-1), rows.reshape(-1)


class Crowds:
    """How the requests of a step fall into crowds; kept, for most steps have the requests of the step before."""

    def __init__(self, canvases: Canvases) -> None:
        self.canvases = canvases
        self.forget()

    def forget(self) -> None:
        """Keep nothing of the step before."""
        self._known: tuple[list[Sequence], int] | None = None
        self._found: tuple[list[Crowd], list[int]] = [], []

    def of(self, asked: list[Sequence]) -> tuple[list[Crowd], list[int]]:
        """The crowds, and the numbers of the requests that are in none.

        A request that is not plain keeps plain ones of its kind out, so that all of a kind are decided in one round.
        """
        known = asked, self.canvases.version
        if self._known != known:
            crowds: dict[tuple, list[int]] = {}
            special = {seq.kind for seq in asked if not seq.plain}
            others = []
            for number, seq in enumerate(asked):
                (others if seq.kind in special else crowds.setdefault(seq.kind, [])).append(number)
            self._known = known
            self._found = [Crowd(asked, numbers, self.canvases) for numbers in crowds.values()], others
        return self._found


class CrowdRound(Round):
    """A crowd's decisions in one step."""

    def __init__(self, crowd: Crowd, layout: Layout, starts: np.ndarray) -> None:
        """`starts` are the first rows of all requests that are asked."""
        self.crowd, self.seqs, self.recipe, self.judged = crowd, crowd.seqs, crowd.recipe, False
        self.grid = grid = crowd.grid(layout, starts)
        self.shape = grid.shape
        masks = crowd.canvases.masked[grid.where]
        self.masks = self.asked = masks if grid.inside is None else masks & grid.inside
        self.at = self.masks.reshape(-1).nonzero()[0]
        self.positions, self.rows = grid.columns[self.at], [grid.rows[self.at]]
        self.states, self.signals = [], None
        self.steps = np.array([seq.step for seq in self.seqs])

    def commits(self, found: list[np.ndarray]) -> Commits | None:
        """What all requests do, by what `compute` gave; None where the logits of some are NaN or infinite."""
        b, w = self.shape
        token, bad, commit = (grid[:b, :w] for grid in found[:3])
        if bad.any():
            return None
        unsettled = self.grid.first + self.masks.argmax(1)
        # A mask is before its block's end, so that what `Sequence._settle` asks of the end holds anyhow.
        clean = unsettled // self.crowd.blocks * self.crowd.blocks
        return Commits(self.seqs, self.steps, self.grid, self.masks, token, commit, clean)

    def _quota(self) -> np.ndarray:
        grid = self.grid
        return np.maximum(1, grid.share + (self.steps - grid.opened < grid.rest))

    def _address(self) -> dict[str, np.ndarray]:
        found = {"seed": self.crowd.seeds, "sample": self.crowd.samples, "step": self.steps}
        return {**{name: x[self.owner] for name, x in found.items()}, "position": self.positions}
