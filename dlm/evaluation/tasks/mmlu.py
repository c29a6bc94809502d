"""MMLU (arXiv 2009.03300): one of several choices."""

import re
import string
from collections.abc import Sequence

from dlm.errors import UserError
from dlm.evaluation.answers import TEXT, answering, marked, normalise
from dlm.evaluation.task import Grade, Question, Task

LETTERS = string.ascii_uppercase
# A label alone, before its text, in a phrase, as a number; "A" and "I" at the start of a sentence are words.
LABELS = tuple(
    re.compile(pattern)
    for pattern in (
        r"[\s(\[{\"'*$]*([A-Za-z])[\s)\]}.:,\"'*$]*$",
        r"[(\[*]*([A-Za-z])\**(?:[).:\]]|\s[-–—]\s)",
        r"(?i:(?:the\s+)?(?:choice|option|letter|answer))\s+[(*]*([A-Za-z])\b",
        r"[(\[]?(\d)[)\].:]?(?:\s|$)",
        r"([B-HJ-Z])\b",
    )
)


class MMLU(Task):
    """A choice by its letter, its text or, where neither fits, its number from 0."""

    def prompt(self, question: Question) -> str:
        listed = "\n".join(f"{letter(i)}. {choice}" for i, choice in enumerate(question.choices))
        return f"{question.question}\n\n{listed}\n\nGive the letter of the right choice as \\boxed{{}}."

    def check(self, question: Question) -> None:
        choices = question.choices
        if not choices:
            raise UserError("`choices` is empty; source mmlu needs the list of answers to choose from")
        if choice_of(question.answer, choices, numbered=True) is None:
            kinds = f"none of the {len(choices)} choices (number, letter or text)"
            raise UserError(f"`answer` = {question.answer!r} is {kinds}")

    def grade(self, text: str, question: Question) -> Grade:
        text, choices = answering(text), question.choices
        right = choice_of(question.answer, choices, numbered=True)
        for part in marked(text):
            chosen = choice_of(part, choices)
            if chosen is not None:
                return Grade.of(chosen == right, part.strip())
        lines = [line for line in text.strip().splitlines() if line.strip()]
        chosen = choice_of(lines[0], choices) if lines else None
        chosen = _mentioned(text, choices) if chosen is None else chosen
        return Grade.of(chosen is not None and chosen == right, "" if chosen is None else letter(chosen))


def letter(index: int) -> str:
    return LETTERS[index] if index < len(LETTERS) else str(index)


def choice_of(answer: str, choices: Sequence[str], numbered: bool = False) -> int | None:
    """Which choice an answer names: by letter, by its text, as `B. its text` or by its number from 0.

    A number that is also some choice's text means that text, unless choices are known to be `numbered`, as the right
    answers of datasets are.
    """
    answer = TEXT.sub(r"\1", answer).strip().strip("*`").strip()
    if numbered and answer.isdecimal() and int(answer) < len(choices):
        return int(answer)
    said = normalise(answer)
    exact = [i for i, choice in enumerate(choices) if choice.strip() == answer]
    alike = [i for i, choice in enumerate(choices) if said and normalise(choice) == said]
    for pattern in LABELS[:1]:
        if (found := _labelled(pattern, answer, choices)) is not None:
            return found
    for found in (exact, alike):
        if len(found) == 1:
            return found[0]
    for pattern in LABELS[1:]:
        if (found := _labelled(pattern, answer, choices)) is not None:
            return found
    return _only(answer, choices)


def _labelled(pattern: re.Pattern[str], answer: str, choices: Sequence[str]) -> int | None:
    match = pattern.match(answer)
    if match is None:
        return None
    index = int(match[1]) if match[1].isdecimal() else LETTERS.index(match[1].upper())
    return index if index < len(choices) else None


def _only(answer: str, choices: Sequence[str]) -> int | None:
    """The one choice whose text the answer holds; of choices that contain each other the longest."""
    said = f" {normalise(answer)} "
    held = {i: f" {normalise(c)} " for i, c in enumerate(choices) if normalise(c) and f" {normalise(c)} " in said}
    longest = [i for i, text in held.items() if not any(text != other and text in other for other in held.values())]
    return longest[0] if len(longest) == 1 else None


def _mentioned(text: str, choices: Sequence[str]) -> int | None:
    """Without any mark: the only choice that is mentioned, by text or as a capital letter."""
    found = _only(text, choices)
    if found is not None:
        return found
    names = LETTERS[: len(choices)]
    single = {name for name in re.findall(rf"\(([{names}])\)|\b([{names}])\b(?=[).:])", text) for name in name if name}
    return LETTERS.index(single.pop()) if len(single) == 1 else None
