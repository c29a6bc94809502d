"""Questions to put to a model, from a task or from JSON lines of `question, answer, choices, source`; and their grades."""

import ast
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dlm.errors import UserError, nearest
from dlm.evaluation.task import Grade, Question
from dlm.evaluation.tasks import TASKS


def load_questions(
    dataset: str | Path, *, source: str | None = None, skip: int = 0, limit: int | None = None, seed: int = 0
) -> list[Question]:
    """Rows of `dataset`: those of `source`, without the first `skip`, `limit` at most.

    `dataset` is a JSONL file, or the name of a task that has questions of its own (20 of them without a `limit`).
    """
    if str(dataset) in TASKS and not Path(dataset).exists():
        if source not in (None, dataset):
            raise UserError(f'source = "{source}": the dataset "{dataset}" has the source "{dataset}" only')
        try:
            return list(TASKS[str(dataset)].questions(skip + (20 if limit is None else limit), seed))[skip:]
        except UserError as error:
            raise UserError(f'dataset = "{dataset}": {error}') from None
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
            f'{path}: cannot be read as a dataset: {why} (give a JSONL file, or "stdlib", the built-in one)'
        ) from None


def _question(line: str, where: str) -> Question:
    try:
        row: Any = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"it holds {error.object[error.start]!a}, half of a surrogate pair"
        raise UserError(f"{where}: no Unicode text: {half}") from None
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
        raise UserError(f"{where}: `source` = {str(source)[:40]!r} must be text, such as {', '.join(TASKS)}")
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float, type(None))):
        raise UserError(f"{where}: `answer` = {str(answer)[:40]!r} must be text or a number")
    answer = "" if answer is None else str(answer).strip()
    if answer and source not in TASKS:
        raise UserError(
            f"{where}: `source` = {source!r} cannot be graded{nearest(source, TASKS)} "
            f"(known sources: {', '.join(TASKS)}; leave `answer` empty to measure speed alone)"
        )
    choices = _choices(row.get("choices"), where)
    found = Question(question=question, answer=answer, choices=choices, source=source, where=where)
    if answer:
        try:
            TASKS[source].check(found)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return found


def prompt_of(question: Question) -> str:
    """What the model is asked, before any chat template; the question as it is where its source is no task."""
    task = TASKS.get(question.source)
    return question.question if task is None else task.prompt(question)


def grade(text: str, question: Question) -> Grade | None:
    """The verdict on what a model wrote; None where the question has no answer."""
    return TASKS[question.source].grade(text, question) if question.answer else None


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


def sources(questions: Sequence[Question]) -> dict[str, int]:
    """How many of each source."""
    return dict(Counter(question.source for question in questions))
