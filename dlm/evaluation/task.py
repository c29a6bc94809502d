"""What an evaluation task is: questions, how each is put to a model, and what an answer is worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dlm.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question; with an empty `answer` it is put to the model but not graded."""

    question: str
    answer: str = ""
    choices: tuple[str, ...] = ()
    source: str = ""
    """The name of its task."""
    where: str = "question"
    """The file and line it came from, for messages."""


@dataclass(frozen=True)
class Grade:
    """The verdict on one answer; `score` is 0 or 1 unless a task grades half-right answers."""

    correct: bool
    score: float
    predicted: str
    """What was taken for the answer; empty where none was found."""

    @classmethod
    def of(cls, correct: bool, predicted: str) -> "Grade":
        """All or nothing."""
        return cls(correct, float(correct), predicted)


class Task(Protocol):
    """A kind of question. `grade` is all that a task must have; the rest suits those that read a dataset's rows."""

    def questions(self, count: int, seed: int) -> Sequence[Question]:
        """The task's own questions, `count` at most, for those who give its name in place of a dataset."""
        raise UserError("has no questions of its own: give a JSONL file of them")

    def prompt(self, question: Question) -> str:
        """What the model is asked, before any chat template."""
        return question.question

    def check(self, question: Question) -> None:
        """UserError where a row cannot be graded; the message goes behind the row's place."""

    def grade(self, text: str, question: Question) -> Grade:
        """The verdict on what a model wrote."""
        ...
