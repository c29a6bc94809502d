"""Questions put to a model through `dlm.generate`, and what its answers are worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm.data import chat
from dlm.evaluation.questions import grade, load_questions, prompt_of
from dlm.evaluation.rate import Rate
from dlm.evaluation.task import Grade, Question
from dlm.models.required import require_lm

if TYPE_CHECKING:
    from dlm.inference.request import Generation
    from dlm.models.lm import LM


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Questions, what was answered, and the verdicts; None where a question has no answer to compare with."""

    questions: Sequence[Question]
    generations: "Sequence[Generation]"
    grades: Sequence[Grade | None]

    @property
    def right(self) -> Rate:
        """How many of the graded ones are correct."""
        return Rate.of(found.correct for found in self.grades if found is not None)


def evaluate(
    lm: "LM",
    dataset: str | Path,
    *,
    source: str | None = None,
    skip: int = 0,
    limit: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Answers:
    """The model's answers to a dataset's questions, graded.

    `dataset` is a JSONL file of question, answer, choices and source, or the name of a task that has questions of its
    own, such as "stdlib". Of its rows those of `source` are asked, without the first `skip`, `limit` at most. `settings`
    are those of `dlm.generate`.
    """
    from dlm.inference.generation import generate

    require_lm(lm, "evaluate()")
    questions = load_questions(dataset, source=source, skip=skip, limit=limit, seed=seed)
    generations = generate(lm, [prompt_ids(lm, question) for question in questions], seed=seed, **settings)
    grades = [grade(found.text, question) for found, question in zip(generations, questions, strict=True)]
    return Answers(questions=questions, generations=generations, grades=grades)


def prompt_ids(lm: "LM", question: Question) -> list[int]:
    """The question's ids; as a user's turn where the model has a chat template of its own."""
    tokenizer, prompt = lm.require_tokenizer(), prompt_of(question)
    if tokenizer.chat_template == chat.PLAIN:
        return tokenizer.begun(tokenizer.encode(prompt, special=False))
    return tokenizer.begun(lm.encode(lm.chat([{"role": "user", "content": prompt}])))
