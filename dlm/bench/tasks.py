"""Tasks whose answers can be judged without a person: Sudoku, and Python written on from held-out files. Decodes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dlm.bench.config import QualitySection
from dlm.errors import UserError
from dlm.evaluation.rate import Rate

if TYPE_CHECKING:
    from dlm.inference.request import Generation
    from dlm.models.lm import LM


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How good the answers were."""

    right: Rate
    """Grids solved, or lines that came back exactly."""
    nats: float | None = None
    """Bound, in nats a token, that the model itself gives what it wrote. Repetition lowers it, so read it beside `right`."""


class Task(Protocol):
    """Prompts, how long their answers are, and a judge."""

    name: str
    infill: bool
    prompts: list[list[int]]

    def block(self, strategy: str) -> int | None:
        """Block length under a strategy; None: all at once."""
        ...

    def masks(self, number: int) -> int:
        """Tokens the answer to a prompt has."""
        ...

    def judge(self, answers: "Sequence[Generation]") -> Verdict: ...


class Sudoku:
    """Held-out puzzles as canvases; blocks are three rows of empty cells, about."""

    name, infill = "sudoku", True
    block_length = 16

    def __init__(self, lm: "LM", s: QualitySection) -> None:
        from dlm.data.sudoku import MASK_ID
        from dlm.evaluation.sudoku import heldout_puzzles, is_sudoku_model

        if not is_sudoku_model(lm):
            raise UserError(f'quality.sudoku = "{s.sudoku}" is no Sudoku model: its tokens 1 to 9 must be the digits')
        self.puzzles = heldout_puzzles(s.puzzles, seed=s.seed)
        self.mask = MASK_ID
        self.prompts = np.where(self.puzzles.puzzles == 0, MASK_ID, self.puzzles.puzzles).astype(int).tolist()

    def block(self, strategy: str) -> int | None:
        return None if strategy == "whole" else self.block_length

    def masks(self, number: int) -> int:
        return self.prompts[number].count(self.mask)

    def judge(self, answers: "Sequence[Generation]") -> Verdict:
        from dlm.evaluation.sudoku import grade

        grids = self.puzzles.puzzles.astype(int)
        for grid, answer in zip(grids, answers, strict=True):
            grid[grid == 0] = answer.tokens
        return Verdict(right=grade(self.puzzles, grids, [a.nfe for a in answers], "", 0.0).solved)


class Python:
    """Held-out files, cut within a line: how often the rest of that line comes back, and the bound of what was written."""

    name, infill = "pico", False

    def __init__(self, lm: "LM", s: QualitySection) -> None:
        from dlm.evaluation.about import STDLIB
        from dlm.evaluation.lines import heldout_lines

        self.lm, self.s = lm, s
        tasks = heldout_lines(STDLIB, s.lines, s.seed, context=4 * s.context)
        tokenizer = lm.require_tokenizer()
        encoded = tokenizer.encode_batch([task.prefix[-16 * s.context :] for task in tasks], special=False)
        self.prompts = [ids[-s.context :] for ids in encoded]
        self.lines = [task.line for task in tasks]

    def block(self, strategy: str) -> int | None:
        return self.s.gen_length if strategy == "whole" else self.s.block_length

    def masks(self, number: int) -> int:
        return self.s.gen_length

    def judge(self, answers: "Sequence[Generation]") -> Verdict:
        from dlm.bench.answers import grade_line

        right = Rate.of(grade_line(a.text, line).correct for a, line in zip(answers, self.lines, strict=True))
        return Verdict(right=right, nats=self.nats([a.tokens for a in answers]))

    def nats(self, answers: Sequence[list[int]]) -> float:
        """Bound of the answers given their prompts, in nats a token; texts of equal length share a forward."""
        import torch

        from dlm.diffusion.bound import likelihood_bound

        lengths = [(len(prompt), len(answer)) for prompt, answer in zip(self.prompts, answers, strict=True)]
        total = 0.0
        for shape in sorted(set(lengths)):
            rows = [i for i, found in enumerate(lengths) if found == shape]
            ids = torch.tensor([self.prompts[i] + answers[i] for i in rows], device=self.lm.device)
            written = (torch.arange(ids.shape[1], device=self.lm.device) >= shape[0]).expand(ids.shape)
            index = torch.tensor(rows, device=self.lm.device)
            with torch.inference_mode():
                nats = likelihood_bound(
                    self.lm.network.predict,
                    ids,
                    self.lm.require_mask_id(),
                    answer=written,
                    index=index,
                    samples=self.s.draws,
                    seed=self.s.seed,
                )
            total += nats.double().mean(-1).sum().item()
        return total / sum(length for _, length in lengths)


TASKS: dict[str, type[Sudoku] | type[Python]] = {"sudoku": Sudoku, "pico": Python}


def options_of(task: Task, strategy: str, rule: str, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """What the engine is told with each prompt; `tokens_per_step` of a variant becomes the steps of that prompt."""
    block = task.block(strategy)
    variant = dict(variant)
    pace = variant.pop("tokens_per_step", 1)
    told = []
    for number in range(len(task.prompts)):
        masks = task.masks(number)
        size = masks if block is None else min(block, masks)
        settings = {"rule": rule, "steps": -(-size // pace) * -(-masks // size), **variant}
        settings |= {"strategy": "multi_block" if strategy == "multi_block" else "block"}
        settings |= {} if block is None else {"block_length": size if task.infill else block}
        told.append(settings if task.infill else settings | {"gen_length": masks})
    return told
