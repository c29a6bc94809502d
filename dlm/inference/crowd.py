"""Rounds of plain requests: what `decide.Round` asks of each request is here read from `Canvases`, for all at once."""

import numpy as np

from dlm.inference.canvases import Canvases, Commits
from dlm.inference.decide import Round, recipe_of
from dlm.inference.layout import Layout
from dlm.inference.sequence import Sequence

ALONE = 1
"""So many requests of a kind are faster asked by themselves."""
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
        self.seeds = np.array([seq.request.seed for seq in self.seqs], np.int64)
        self.samples = np.array([seq.request.sample for seq in self.seqs], np.int64)


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
            large = [numbers for numbers in crowds.values() if len(numbers) > ALONE]
            others += [number for numbers in crowds.values() if len(numbers) <= ALONE for number in numbers]
            self._known = known
            self._found = [Crowd(asked, numbers, self.canvases) for numbers in large], sorted(others)
        return self._found


class CrowdRound(Round):
    """A crowd's decisions in one step."""

    def __init__(self, crowd: Crowd, layout: Layout, starts: np.ndarray) -> None:
        """`starts` are the first rows of all requests that are asked."""
        self.crowd, self.seqs, self.recipe, self.judged = crowd, crowd.seqs, crowd.recipe, False
        canvases = crowd.canvases
        self.first, self.end, self.steps, self.opened = canvases.opened[crowd.places].T
        widths = self.end - self.first
        width = int(widths.max())
        self.shape = len(self.seqs), width
        columns = self.first[:, None] + np.arange(width)
        self.where = columns + crowd.offsets
        if (widths == width).all():
            self.masks = canvases.masked[self.where]
        else:
            self.masks = canvases.masked.take(self.where, mode="clip") & (columns < self.end[:, None])
        self.asked = self.masks
        self.at = np.flatnonzero(self.masks)
        self.positions = columns.reshape(-1)[self.at]
        own, shift = starts[crowd.numbers], self.seqs[0].shift
        predicting = np.maximum(self.positions - shift, 0) if shift else self.positions
        self.rows = [predicting + (own - layout.host_positions[own])[self.owner]]
        self.states, self.signals = [], None

    def commits(self, found: list[np.ndarray]) -> Commits | None:
        """What all requests do, by what `compute` gave; None where the logits of some are NaN or infinite."""
        b, w = self.shape
        token, bad, commit = (grid[:b, :w] for grid in found[:3])
        if bad.any():
            return None
        unsettled = self.first + self.masks.argmax(1)
        # A mask is before its block's end, so that what `Sequence._settle` asks of the end holds anyhow.
        clean = unsettled // self.crowd.blocks * self.crowd.blocks
        return Commits(self.seqs, self.first, self.end, self.where, self.masks, token, commit, clean)

    def _quota(self) -> np.ndarray:
        masked, steps = self.end - self.first, np.array([seq.step for seq in self.seqs]) - self.opened
        return np.maximum(1, masked // self.steps + (steps < masked % self.steps))

    def _address(self) -> dict[str, np.ndarray]:
        found = {"seed": self.crowd.seeds, "sample": self.crowd.samples, "step": [seq.step for seq in self.seqs]}
        return {**{name: np.asarray(x)[self.owner] for name, x in found.items()}, "position": self.positions}
