"""What `quality` has models do, and how well it was done: Sudoku, Python lines filled in, Python written on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from dlm.bench.config import QualitySection
from dlm.errors import UserError
from dlm.evaluation.rate import Z95, Rate

if TYPE_CHECKING:
    from dlm.inference.request import Generation
    from dlm.models.lm import LM


@dataclass(frozen=True)
class Nats:
    """Bound, in nats a token, that the model itself gives a set of texts, and how far their choice may have moved it."""

    value: float
    error: float | None
    """Half of the interval at 95 %; texts are taken for independent. One text has none."""

    @classmethod
    def of(cls, nats: Sequence[float], tokens: Sequence[int]) -> "Nats":
        """From each text's sum and length: a ratio of means, with the ratio's standard error."""
        value = sum(nats) / sum(tokens)
        apart = sum((n - value * t) ** 2 for n, t in zip(nats, tokens, strict=True))
        return cls(value, Z95 * sqrt(apart) / sum(tokens) if len(tokens) > 1 else None)

    def __str__(self) -> str:
        from dlm.diffusion.bound import with_error

        return with_error(self.value, self.error, ".2f", single="one text")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How good the answers were, as far as the trial can tell."""

    right: Rate | None = None
    """Grids solved, or lines that came back exactly."""
    nats: Nats | None = None
    """Of what was written, given what was shown. Repetition lowers it: see `fresh`."""
    fresh: float | None = None
    """Share of pairs of neighbouring tokens that have not been in the same answer before."""


class Trial(Protocol):
    """Prompts, how many tokens their answers have and in what blocks, and a judge."""

    name: str
    measures: ClassVar[dict[str, str]]
    """Field of the verdict -> what it is called."""
    infill: bool
    block_length: int
    prompts: list[list[int]]

    def masks(self, number: int) -> int:
        """Tokens the answer to a prompt has."""
        ...

    def truth(self) -> "Verdict | None":
        """What the files themselves say in the same places, judged in the same way."""
        ...

    def judge(self, answers: "Sequence[Generation]") -> Verdict: ...


class Sudoku:
    """Held-out puzzles as canvases; blocks are so many empty cells, in reading order."""

    name, infill = "sudoku", True
    measures: ClassVar[dict[str, str]] = {"right": "puzzles solved"}

    def __init__(self, lm: "LM", s: QualitySection) -> None:
        from dlm.evaluation.sudoku import heldout_puzzles, is_sudoku_model
        from dlm.sudoku.text import MASK_ID

        if not is_sudoku_model(lm):
            raise UserError(f'quality.sudoku = "{s.sudoku}" is no Sudoku model: its tokens 1 to 9 must be the digits')
        self.block_length = s.cells
        self.puzzles = heldout_puzzles(s.puzzles, seed=s.seed)
        self.mask = MASK_ID
        self.prompts = np.where(self.puzzles.puzzles == 0, MASK_ID, self.puzzles.puzzles).astype(int).tolist()

    def masks(self, number: int) -> int:
        return self.prompts[number].count(self.mask)

    def truth(self) -> None:
        return None

    def judge(self, answers: "Sequence[Generation]") -> Verdict:
        from dlm.evaluation.sudoku import grade

        grids = self.puzzles.puzzles.astype(int)
        for grid, answer in zip(grids, answers, strict=True):
            grid[grid == 0] = answer.tokens
        return Verdict(right=grade(self.puzzles, grids, [a.nfe for a in answers], "", 0.0).solved)


class Lines:
    """Held-out lines with their files on both sides: how often a line comes back, and the bound of what was filled in."""

    name, infill = "pico, lines filled in", True
    measures: ClassVar[dict[str, str]] = {"right": "lines exact", "nats": "nats a token"}

    def __init__(self, lm: "LM", s: QualitySection) -> None:
        from dlm.evaluation.infill import window

        self.lm, self.s, self.block_length = lm, s, s.hole_block
        self.tasks = _heldout(s)
        windows = [window(lm, task, s.context, "oracle") for task in self.tasks]
        self.prompts, self.holes = [w.ids for w in windows], [w.hole for w in windows]

    def masks(self, number: int) -> int:
        return self.holes[number]

    def truth(self) -> Verdict:
        lines = self.lm.require_tokenizer().encode_batch([task.line for task in self.tasks], special=False)
        return self._verdict(lines)

    def judge(self, answers: "Sequence[Generation]") -> Verdict:
        from dlm.evaluation.infill import answer_of, grade

        said = [answer_of(self.lm, answer.tokens, lead=False) for answer in answers]
        right = Rate.of(grade(task, text).exact for task, text in zip(self.tasks, said, strict=True))
        return self._verdict([answer.tokens for answer in answers], right)

    def _verdict(self, answers: Sequence[Sequence[int]], right: Rate | None = None) -> Verdict:
        mask = self.lm.require_mask_id()
        holes = [np.array(prompt) == mask for prompt in self.prompts]
        filled = [np.array(prompt) for prompt in self.prompts]
        for ids, hole, answer in zip(filled, holes, answers, strict=True):
            ids[hole] = answer
        return Verdict(right=right, nats=bound_of(self.lm, filled, holes, self.s), fresh=fresh(answers))


class Written:
    """Held-out files cut before a line, and written on: the bound of what was written."""

    name, infill = "pico, texts written on", False
    measures: ClassVar[dict[str, str]] = {"nats": "nats a token"}

    def __init__(self, lm: "LM", s: QualitySection) -> None:
        self.lm, self.s, self.block_length = lm, s, s.block_length
        self.tasks, tokenizer = _heldout(s), lm.require_tokenizer()
        reach = 16 * s.context  # characters: long enough for so many tokens
        encoded = tokenizer.encode_batch([task.prefix[-reach:] for task in self.tasks], special=False)
        self.prompts = [ids[-s.context :] for ids in encoded]

    def masks(self, number: int) -> int:
        return self.s.gen_length

    def truth(self) -> Verdict:
        reach = 16 * self.s.gen_length
        rest = [(task.line + task.suffix)[:reach] for task in self.tasks]
        encoded = self.lm.require_tokenizer().encode_batch(rest, special=False)
        return self._verdict([ids[: self.s.gen_length] for ids in encoded])

    def judge(self, answers: "Sequence[Generation]") -> Verdict:
        return self._verdict([answer.tokens for answer in answers])

    def _verdict(self, answers: Sequence[Sequence[int]]) -> Verdict:
        pairs = list(zip(self.prompts, answers, strict=True))
        texts = [np.array([*prompt, *answer]) for prompt, answer in pairs]
        written = [np.arange(len(prompt) + len(answer)) >= len(prompt) for prompt, answer in pairs]
        return Verdict(nats=bound_of(self.lm, texts, written, self.s), fresh=fresh(answers))


TRIALS: dict[str, tuple[type[Sudoku] | type[Lines] | type[Written], ...]] = {
    "sudoku": (Sudoku,),
    "pico": (Lines, Written),
}
"""Model -> what it is put to."""


def _heldout(s: QualitySection) -> list[Any]:
    from dlm.evaluation.about import STDLIB
    from dlm.evaluation.lines import heldout_lines

    return heldout_lines(STDLIB, s.lines, s.seed, context=4 * s.context)


def bound_of(lm: "LM", texts: Sequence[np.ndarray], written: Sequence[np.ndarray], s: QualitySection) -> Nats:
    """Of the `written` positions given the others, (l,) bool each; texts of equal length share a forward."""
    import torch

    from dlm.training.scoring import sequence_nats

    nats = np.zeros(len(texts))
    for length in {len(ids) for ids in texts}:
        rows = [i for i, ids in enumerate(texts) if len(ids) == length]
        ids, answer, index = (
            torch.as_tensor(np.array(found), device=lm.device)
            for found in ([texts[i] for i in rows], [written[i] for i in rows], rows)
        )
        with torch.inference_mode():
            draws = sequence_nats(lm.network, ids, answer=answer, index=index, samples=s.draws, seed=s.seed)
        nats[rows] = draws.double().mean(-1).cpu().numpy()
    return Nats.of(nats.tolist(), [int(here.sum()) for here in written])


def fresh(answers: Sequence[Sequence[int]]) -> float | None:
    """Pairs of neighbours that are new to their answer, among all; None of answers too short to have any."""
    total = sum(max(len(answer) - 1, 0) for answer in answers)
    return sum(len(set(pairwise(a))) for a in answers) / total if total else None


def options_of(trial: Trial, strategy: str, rule: str, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """The engine's settings for each prompt; `tokens_per_step` of a variant becomes the steps of that prompt."""
    variant = dict(variant)
    pace = variant.pop("tokens_per_step", 1)
    found = []
    for number in range(len(trial.prompts)):
        masks = trial.masks(number)
        size = masks if strategy == "whole" else min(trial.block_length, masks)
        settings = {"rule": rule, "block_length": size, "steps": -(-size // pace) * -(-masks // size), **variant}
        settings["strategy"] = "multi_block" if strategy == "multi_block" else "block"
        found.append(settings | ({"infill": True} if trial.infill else {"gen_length": masks}))
    return found
