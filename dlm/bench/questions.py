"""Questions to put to a model: JSON lines of `question, answer, choices, source`, or held-out lines of Python.

Knows no model and grades nothing; what a source asks for, and how, is in PROMPTS.
"""

import ast
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.bench.answers import GRADERS, choice_of, letter
from dlm.config import nearest
from dlm.errors import UserError

STDLIB = "stdlib"
"""The built-in set: lines of the standard library that no bundled model was trained on, to be written after what precedes them."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One row of a dataset. An empty `answer` is timed but not graded."""

    question: str
    answer: str = ""
    choices: tuple[str, ...] = ()
    source: str = ""
    where: str = "question"
    """The file and line it came from, for messages."""

    @property
    def prompt(self) -> str:
        """What the model is asked, before any chat template."""
        return PROMPTS.get(self.source, _plain)(self)


def load_questions(
    dataset: str | Path, *, source: str | None = None, skip: int = 0, limit: int | None = None, seed: int = 0
) -> list[Question]:
    """Rows of `dataset`, a JSONL file or "stdlib": those of `source`, without the first `skip`, `limit` at most."""
    if str(dataset) == STDLIB and not Path(dataset).exists():
        if source not in (None, "line"):
            raise UserError(f'source = "{source}": the built-in dataset "{STDLIB}" has the source "line" only')
        return _stdlib(skip, limit, seed)
    found: list[Question] = []
    met: Counter[str] = Counter()
    for number, line in _lines(Path(dataset)):
        question = _question(line, f"{dataset}:{number}")
        met[question.source] += 1
        if source is None or question.source == source:
            found.append(question)
        if limit is not None and len(found) >= skip + limit:
            break
    if len(found) > skip:
        return found[skip:]
    if not met:
        raise UserError(f"{dataset} holds no question: give a file with one JSON object a line")
    if source is not None and source not in met:
        has = ", ".join(f"{name} ({count})" for name, count in met.items())
        raise UserError(f'source = "{source}": {dataset} has no such source{nearest(source, met)} (it has {has})')
    raise UserError(f"skip_sample = {skip} leaves nothing: {dataset} has {len(found)} questions of that kind")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f'{path}: cannot be read as a dataset: {why} (give a JSONL file, or "{STDLIB}", the built-in one)'
        ) from None


def _question(line: str, where: str) -> Question:
    try:
        row: Any = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: no Unicode text: it holds {error.object[error.start]!a}, half of a surrogate pair"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
        raise UserError(f"{where}: not JSON ({error}); a dataset holds one object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: {type(row).__name__} instead of an object with question, answer, choices, source")
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        what = "is missing" if "question" not in row else f"= {str(question)[:40]!r} is no text"
        raise UserError(f"{where}: `question` {what}; the row has {', '.join(map(str, row)) or 'no keys'}")
    source = row.get("source") or ""
    if not isinstance(source, str):
        raise UserError(f"{where}: `source` = {str(source)[:40]!r} must be text, such as {', '.join(GRADERS)}")
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float, type(None))):
        raise UserError(f"{where}: `answer` = {str(answer)[:40]!r} must be text or a number")
    answer = "" if answer is None else str(answer).strip()
    if answer and source not in GRADERS:
        raise UserError(
            f"{where}: `source` = {source!r} cannot be graded{nearest(source, GRADERS)} "
            f"(known sources: {', '.join(GRADERS)}; leave `answer` empty to measure speed alone)"
        )
    choices = _choices(row.get("choices"), where)
    if answer and source == "mmlu":
        if not choices:
            raise UserError(f"{where}: `choices` is empty; source mmlu needs the list of answers to choose from")
        if choice_of(answer, choices, numbered=True) is None:
            raise UserError(
                f"{where}: `answer` = {answer!r} is none of the {len(choices)} choices (number, letter or text)"
            )
    return Question(question=question, answer=answer, choices=choices, source=source, where=where)


def _choices(value: Any, where: str) -> tuple[str, ...]:
    """A list, or the text of one as JSON or Python writes it."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise UserError(f"{where}: `choices` = {value[:40]!r} is no list of texts") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, (str, int, float)) for entry in value):
        raise UserError(f"{where}: `choices` = {str(value)[:40]!r} is no list of texts")
    return tuple(str(entry) for entry in value)


def _stdlib(skip: int, limit: int | None, seed: int) -> list[Question]:
    from dlm.evaluation.about import STDLIB as DATA
    from dlm.evaluation.lines import heldout_lines

    tasks = heldout_lines(DATA, skip + (20 if limit is None else limit), seed)[skip:]
    return [
        Question(question=task.prefix[-CONTEXT:], answer=task.line, source="line", where=f"{STDLIB}:{task.name}")
        for task in tasks
    ]


CONTEXT = 1200  # characters of a file before the line


def _plain(question: Question) -> str:
    return question.question


def _boxed(question: Question) -> str:
    return f"{question.question}\n\nReason step by step, and give the final answer as \\boxed{{}}."


def _choice(question: Question) -> str:
    listed = "\n".join(f"{letter(i)}. {choice}" for i, choice in enumerate(question.choices))
    return f"{question.question}\n\n{listed}\n\nGive the letter of the right choice as \\boxed{{}}."


def _short(question: Question) -> str:
    return f"{question.question}\n\nAnswer in a few words, given as \\boxed{{}}."


PROMPTS: dict[str, Callable[[Question], str]] = {
    "gsm8k": _boxed,
    "math": _boxed,
    "math500": _boxed,
    "mmlu": _choice,
    "hotpotqa": _short,
    "longbench_hotpotqa": _short,
}
"""Sources that are asked for a form; any other question stands as it is written."""


def sources(questions: Sequence[Question]) -> dict[str, int]:
    """How many of each source."""
    return dict(Counter(question.source for question in questions))
