"""Tasks whose answers are read: Sudoku grids, lines filled in, questions of a file, and tasks of your own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.data.lines import STDLIB, heldout_lines, parses
from dlm.errors import UserError
from dlm.evaluation.rate import Rate
from dlm.evaluation.sudoku import BANDS, heldout_puzzles, is_sudoku_model
from dlm.evaluation.suite.decoded import Decoded, effort, spent
from dlm.evaluation.suite.task_section import TaskSection
from dlm.evaluation.suite.trial import Record, Setting, data_digest

if TYPE_CHECKING:
    from dlm.evaluation.task import Question, Task
    from dlm.inference.request import Generation
    from dlm.models.lm import LM

PUZZLES, LINES, QUESTIONS = 1000, 250, 100
"""Items of a task that makes its own, without a limit."""


class Sudoku(Decoded):
    """Held-out puzzles, solved by infilling: right when every cell is."""

    infill, measure = True, "solved"

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        super().__init__(lm, task, setting)
        if not is_sudoku_model(lm):
            raise UserError(
                f'task "{task.label}": model {lm.name!r} is no Sudoku model: its tokens 1 to 9 must be the digits'
            )
        self.puzzles = heldout_puzzles(setting.limit(task) or PUZZLES, task.empty, setting.seed)
        self.names = [f"puzzle {i}" for i in range(len(self.puzzles))]

    def prompt(self, number: int) -> list[int]:
        from dlm.sudoku.text import MASK_ID

        puzzle = self.puzzles.puzzles[number]
        return np.where(puzzle == 0, MASK_ID, puzzle).astype(int).tolist()

    def masks(self, number: int) -> int:
        return int(self.puzzles.empty[number])

    def truth(self, number: int) -> Any:
        return self.prompt(number), self.puzzles.solutions[number].tolist()

    def judge(self, numbers: Sequence[int], answers: "Sequence[Sequence[Generation]]") -> list[Record]:
        from dlm.sudoku.solver import check_solution

        records = []
        for number, (answer, *_) in zip(numbers, answers, strict=True):
            puzzle, true = self.puzzles.puzzles[number], self.puzzles.solutions[number]
            grid = puzzle.astype(int)
            grid[puzzle == 0] = answer.tokens
            cells = int((grid == true)[puzzle == 0].sum())
            solved = bool(check_solution(puzzle, grid))
            record = {"item": self.names[number], "solved": solved, "cells": cells, "empty": self.masks(number)}
            records.append({**record, "written": list(answer.tokens), **spent([answer])})
        return records

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        right, cells = (sum(record[name] for record in records) for name in ("cells", "empty"))
        bands = {
            f"{low}–{high} empty": Rate.of(r["solved"] for r in records if low <= r["empty"] <= high).to_dict()
            for low, high in BANDS
        }
        by_empty = {band: rate for band, rate in bands.items() if rate["total"]}
        return {**super().summary(records), "cells_right": right / cells, "by_empty": by_empty}


class Lines(Decoded):
    """Lines of held-out files of Python's standard library, filled in between what stands around them."""

    infill, measure = True, "exact"

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        from dlm.evaluation.infill import window

        super().__init__(lm, task, setting)
        if task.hole not in ("oracle", "given"):
            raise UserError(f'task "{task.label}": hole = "{task.hole}": lines are asked with oracle or given')
        self.lines = heldout_lines(STDLIB, setting.limit(task) or LINES, setting.seed)
        self.names = [line.name for line in self.lines]
        self.windows = [window(lm, line, task.length, task.hole) for line in self.lines]

    def prompt(self, number: int) -> list[int]:
        return self.windows[number].ids

    def masks(self, number: int) -> int:
        return self.windows[number].hole

    def truth(self, number: int) -> Any:
        return vars(self.lines[number])

    def judge(self, numbers: Sequence[int], answers: "Sequence[Sequence[Generation]]") -> list[Record]:
        from dlm.evaluation.infill import answer_of, grade

        records = []
        for number, (answer, *_) in zip(numbers, answers, strict=True):
            found = grade(self.lines[number], answer_of(self.lm, answer.tokens, self.windows[number].lead))
            facts = {"exact": found.exact, "stripped": found.stripped, "parses": found.parses, "text": found.answer}
            records.append({"item": self.names[number], **facts, **spent([answer])})
        return records

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        rates = {name: Rate.of(r[name] for r in records).to_dict() for name in ("exact", "stripped", "parses")}
        rates["parses_left_empty"] = Rate.of(parses(line.filled("")) for line in self.lines).to_dict()
        return rates | {"hole_tokens": sum(r["tokens"] for r in records) / len(records)} | effort(records)


class Questions(Decoded):
    """Questions with answers that a grader reads: rows of a file (BlockInfer's 200), or a task's own."""

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        super().__init__(lm, task, setting)
        self.questions = self.found(setting.limit(task))
        self.names = [f"{question.where}" for question in self.questions]
        if len(set(self.names)) < len(self.names):
            self.names = [f"{name} {i}" for i, name in enumerate(self.names)]

    def found(self, limit: int | None) -> "Sequence[Question]":
        """The questions that are asked."""
        from dlm.evaluation.questions import load_questions

        data, source = self.task.require("data"), self.task.source
        return load_questions(data, source=source, limit=limit, seed=self.setting.seed)

    def prompt(self, number: int) -> list[int]:
        from dlm.evaluation.asking import prompt_ids

        return prompt_ids(self.lm, self.questions[number])

    def truth(self, number: int) -> Any:
        question = self.questions[number]
        return question.question, question.answer, question.choices, question.source

    def graded(self, number: int, text: str) -> Any:
        """The verdict on an answer."""
        from dlm.evaluation.questions import grade

        return grade(text, self.questions[number])

    def judge(self, numbers: Sequence[int], answers: "Sequence[Sequence[Generation]]") -> list[Record]:
        records = []
        for number, (answer, *_) in zip(numbers, answers, strict=True):
            found = self.graded(number, answer.text)
            facts = {"correct": False, "score": 0.0, "predicted": ""} if found is None else vars(found)
            source = self.questions[number].source
            records.append(
                {"item": self.names[number], "source": source, **facts, "text": answer.text, **spent([answer])}
            )
        return records

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        sources = dict.fromkeys(record["source"] for record in records)
        by_source = {
            source: Rate.of(r["correct"] for r in records if r["source"] == source).to_dict() for source in sources
        }
        score = sum(record["score"] for record in records) / max(1, len(records))
        return {**super().summary(records), "score": score, **({"by_source": by_source} if len(sources) > 1 else {})}


class FromFile(Questions):
    """A task of your own: a Python file with a `dlm.evaluation.Task` that has questions, as `TASK` or as a class."""

    def found(self, limit: int | None) -> "Sequence[Question]":
        self.own = task_in(self.task.require("data"))
        found = list(self.own.questions(QUESTIONS if limit is None else limit, self.setting.seed))
        if not found:
            raise UserError(f"{self.task.data}: its task has no questions")
        return found[:limit]

    def prompt(self, number: int) -> list[int]:
        tokenizer = self.lm.require_tokenizer()
        return tokenizer.begun(tokenizer.encode(self.own.prompt(self.questions[number]), special=False))

    def truth(self, number: int) -> Any:
        return super().truth(number), data_digest(self.task.require("data"))  # its prompt and its grade are in the file

    def graded(self, number: int, text: str) -> Any:
        return self.own.grade(text, self.questions[number])


def task_in(path: str) -> "Task":
    """The task that a Python file holds: what it calls TASK, else the only class with questions and a grade."""
    import runpy
    from pathlib import Path

    if not Path(path).is_file():
        raise UserError(f"{path}: no such file: give a Python file with a task in it")
    try:
        names = runpy.run_path(path, run_name="dlm_eval_task")
    except Exception as error:
        raise UserError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    if "TASK" in names:
        return names["TASK"]
    own = [
        value
        for value in names.values()
        if isinstance(value, type) and value.__module__ == "dlm_eval_task" and hasattr(value, "grade")
    ]
    if len(own) != 1:
        raise UserError(
            f"{path} has {len(own)} classes with a `grade`: call the task TASK, as in TASK = Mine(), where Mine derives from "
            "dlm.evaluation.Task and has questions(count, seed) and grade(text, question)"
        )
    return own[0]()
