"""Sudoku solved by infilling: exact-solution rate by empty cells, rule and tokens a forward."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.errors import UserError
from dlm.evaluation.filling import Filling, Tick, fill
from dlm.evaluation.rate import Rate
from dlm.sudoku.puzzles import generate_puzzles
from dlm.sudoku.solver import Grid, check_solution
from dlm.sudoku.text import MASK_ID

if TYPE_CHECKING:
    from dlm.models.lm import LM

BANDS = ((30, 35), (36, 40), (41, 45), (46, 50), (51, 55))
EASY = (30, 45)  # the range that the bundled model promises something for

MAIN = (
    Filling(rule="random"),
    Filling(rule="low_confidence"),
    Filling(rule="margin"),
    Filling(rule="threshold", options={"threshold": 0.9}),
)
"""The rules at their most careful: one token a step, and the usual threshold."""

SWEEP = (
    Filling(rule="entropy"),
    # The same network, made to write from left to right: what the free order is worth.
    Filling(rule="low_confidence", options={"block_length": 1}, name="left to right 1/step"),
    *(Filling(rule=rule, tokens_per_step=k) for rule in ("random", "margin") for k in (2, 4, 8)),
    *(Filling(rule="threshold", options={"threshold": t}) for t in (0.5, 0.7, 0.8, 0.95, 0.99)),
    *(Filling(rule="factor", options={"factor": f}) for f in (0.1, 0.3, 1.0)),
    *(Filling(rule="entropy_bound", options={"gamma": g}) for g in (0.01, 0.1, 0.5)),
    Filling(rule="hierarchical", options={"threshold": 0.9, "tau_low": 0.5}),
    Filling(rule="credit", options={"threshold": 0.9}),
)
"""Other rules, and the price of more tokens a step."""


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


@dataclass(frozen=True, kw_only=True)
class SudokuResult:
    """What one way of decoding made of the puzzles."""

    decoding: str
    solved: Rate
    """Puzzles whose every cell is right."""
    easy: Rate
    """Those with 30 to 45 empty cells."""
    bands: dict[str, Rate]
    """By empty cells, "30-35" and so on."""
    cell_accuracy: float
    """Share of all empty cells that were filled rightly."""
    nfe: float
    """Forward passes a puzzle, on average."""
    tpf: float
    """Cells filled a forward pass, over all puzzles."""
    seconds: float

    def row(self) -> dict[str, Any]:
        """One line of a table."""
        return {
            "decoding": self.decoding,
            "tpf": round(self.tpf, 2),
            "nfe": round(self.nfe, 1),
            "puzzles": self.solved.total,
            "solved": str(self.solved),
            "easy": str(self.easy),
            **{band: _percent(rate) for band, rate in self.bands.items()},
            "cells": _percent(self.cell_accuracy),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = {name: value.to_dict() if isinstance(value, Rate) else value for name, value in vars(self).items()}
        return {**found, "bands": {band: rate.to_dict() for band, rate in self.bands.items()}}


HEADINGS = {
    "decoding": "rule",
    "tpf": "TPF",
    "nfe": "NFE",
    "puzzles": "puzzles",
    "solved": "solved (95 %)",
    "easy": f"{EASY[0]}–{EASY[1]} empty (95 %)",
    **{f"{low}-{high}": f"{low}–{high}" for low, high in BANDS},
    "cells": "cells right",
}


def evaluate_sudoku(
    lm: "LM", puzzles: Puzzles, decoding: Filling, *, batch_size: int = 64, seed: int = 0, tick: Tick | None = None
) -> SudokuResult:
    """Solve every puzzle with `dlm.infill` and check each answer against the rules and the givens."""
    from dlm.models.required import require_lm

    require_lm(lm, "evaluate_sudoku()")
    if not is_sudoku_model(lm):
        raise UserError(
            f"model {lm.name!r} is no Sudoku model: its tokens 1 to 9 must be the digits and {MASK_ID} the mask; "
            "train one with `dlm-train --config sudoku`"
        )
    started = time.perf_counter()
    canvases = np.where(puzzles.puzzles == 0, MASK_ID, puzzles.puzzles).astype(int).tolist()
    generations = fill(lm, canvases, decoding, batch_size=batch_size, seed=seed, tick=tick)
    seconds = time.perf_counter() - started
    answers = puzzles.puzzles.astype(int)
    for answer, generation in zip(answers, generations, strict=True):
        answer[answer == 0] = generation.tokens
    return grade(puzzles, answers, [g.nfe for g in generations], decoding.label, seconds)


def grade(
    puzzles: Puzzles, answers: "np.ndarray[Any, np.dtype[Any]]", nfe: Sequence[int], decoding: str, seconds: float
) -> SudokuResult:
    """Judge full grids `answers` (n, 81)."""
    empty, hole = puzzles.empty, puzzles.puzzles == 0
    solved = np.array([check_solution(p, a) for p, a in zip(puzzles.puzzles, answers, strict=True)], bool)

    def among(low: int, high: int) -> Rate:
        return Rate.of(solved[(low <= empty) & (empty <= high)])

    return SudokuResult(
        decoding=decoding,
        solved=Rate.of(solved),
        easy=among(*EASY),
        bands={f"{low}-{high}": among(low, high) for low, high in BANDS},
        cell_accuracy=float((answers == puzzles.solutions)[hole].mean()),
        nfe=sum(nfe) / len(nfe),
        tpf=int(hole.sum()) / sum(nfe),
        seconds=seconds,
    )


def is_sudoku_model(lm: "LM") -> bool:
    """Whether a model has a token a cell, as `dlm.sudoku.sudoku_tokenizer` has them."""
    return lm.mask_id == MASK_ID and lm.tokenizer is not None and lm.encode("123456789") == list(range(1, 10))


def _percent(rate: Rate | float) -> str:
    value = rate.value if isinstance(rate, Rate) else rate
    return "–" if value is None else f"{100 * value:.1f} %"
