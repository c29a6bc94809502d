"""[[task]]: what is asked, and how it is put to a model. Importing it costs no torch."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, model_validator

from dlm.errors import UserError
from dlm.reading import Reader, judged, unread

Kind = Literal[
    "humaneval", "mbpp", "infilling", "lines", "sudoku", "questions", "file", "bound", "perplexity", "lm_eval"
]


def _only(*kinds: str) -> Reader:
    where = f"by tasks of kind {', '.join(kinds)}"
    return Reader(decides="kind", where=where, reads=lambda task, kinds=kinds: task.kind in kinds)


TASK_READERS = {
    "data": _only("humaneval", "mbpp", "infilling", "questions", "file", "bound", "perplexity"),
    "samples": _only("humaneval", "mbpp"),
    "k": _only("humaneval", "mbpp"),
    "timeout": _only("humaneval", "mbpp", "infilling"),
    "hole": _only("infilling", "lines"),
    "hole_tokens": Reader(decides="hole", where='with hole = "fixed"', reads=lambda task: task.hole == "fixed"),
    "hole_range": Reader(decides="hole", where='with hole = "unknown"', reads=lambda task: task.hole == "unknown"),
    "length": _only("infilling", "lines", "bound", "perplexity"),
    "gen_length": _only("humaneval", "mbpp", "questions", "file", "perplexity"),
    "shots": _only("mbpp", "lm_eval"),
    "chat": _only("lm_eval"),
    "tasks": _only("lm_eval"),
    "include": _only("lm_eval"),
    "draws": _only("bound", "lm_eval"),
    "judge": _only("perplexity"),
    "source": _only("questions"),
    "empty": _only("sudoku"),
}
"""Which tasks read which settings."""


class TaskSection(BaseModel, frozen=True, extra="forbid"):
    """[[task]]: a task, and how it is put to the models."""

    kind: Kind = Field(description="What is asked.")
    name: str | None = Field(default=None, min_length=1, description="What tables call it; none: its kind and data.")
    data: str | None = Field(
        default=None,
        min_length=1,
        description="File of records, as the data set's authors publish it (JSONL, gzip or not); of bound and perplexity a "
        "text file or folder, none: Python's standard library; of file a Python file with a task.",
    )
    limit: int | None = Field(default=None, ge=1, description="Items at most; none: that of [eval].")
    samples: int = Field(default=1, ge=1, description="Answers to each problem.")
    k: tuple[int, ...] = Field(default=(1,), min_length=1, description="Of which pass@k is estimated.")
    timeout: float = Field(default=10.0, gt=0, le=3600, description="Seconds a program may take.")
    hole: Literal["oracle", "in_place", "given", "fixed", "unknown"] = Field(
        default="oracle",
        description="Tokens of a hole: oracle, the true text's, alone; in_place, in its text; given, the first rounded up to "
        "a multiple of 8; fixed, hole_tokens; unknown, chosen by the model from hole_range.",
    )
    hole_tokens: tuple[int, ...] = Field(
        default=(8, 16, 32, 64), min_length=1, description="hole = fixed: lengths that are each tried, and averaged."
    )
    hole_range: tuple[int, int] = Field(default=(4, 64), description="hole = unknown: the least and the most tokens.")
    length: int = Field(default=512, ge=16, description="Tokens that the model sees of a text, at most.")
    gen_length: int = Field(default=256, ge=1, description="Tokens to generate for each item, at most.")
    shots: int | None = Field(default=None, ge=0, description="Examples in the prompt; none: the task's own number.")
    chat: bool = Field(default=False, description="Put the prompt through the model's chat template.")
    tasks: tuple[str, ...] = Field(default=(), description="lm_eval: names of its tasks or groups.")
    include: str | None = Field(default=None, description="lm_eval: a folder of task files of your own.")
    draws: int = Field(default=8, ge=2, description="Draws of each likelihood bound.")
    judge: str | None = Field(default=None, description="perplexity: the causal checkpoint that judges the texts.")
    source: str | None = Field(default=None, description="questions: those of this source only.")
    empty: tuple[int, int] = Field(default=(30, 55), description="sudoku: empty cells, least and most.")

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.name is not None:
            return self.name
        words = [self.kind, *self.tasks, *([Path(self.data).name.partition(".")[0]] if self.data else [])]
        return " ".join(words + ([self.hole] if self.kind in ("infilling", "lines") else []))

    @model_validator(mode="after")
    def _reads_all(self, info: ValidationInfo) -> "TaskSection":
        if (problem := unread(self, TASK_READERS, judged(self, TASK_READERS))) is not None:
            raise ValueError(problem)
        needed = {"humaneval": "data", "mbpp": "data", "infilling": "data", "questions": "data", "file": "data"}
        needed |= {"lm_eval": "tasks", "perplexity": "judge"}
        field = needed.get(self.kind)
        if field == "tasks" and not self.tasks:
            raise ValueError('tasks = []: name tasks of lm-eval, as in tasks = ["gsm8k"]')
        if max(self.k) > self.samples or min(self.k) < 1:
            raise ValueError(
                f"k = {list(self.k)} needs {max(self.k)} samples of each problem, and samples = {self.samples}"
            )
        if not 1 <= self.hole_range[0] <= self.hole_range[1]:
            raise ValueError(f"hole_range = {list(self.hole_range)}: give the least first, and at least 1")
        return self

    def require(self, field: str) -> Any:
        """A setting without which this task cannot run."""
        value = getattr(self, field)
        if value is None:
            raise UserError(f'task "{self.label}": {field} is missing: give it in the file, or as --task.N.{field}')
        return value
