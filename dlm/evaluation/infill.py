"""Single-line infilling: how often the line comes back, and how often the file still parses.

A window of `length` tokens is shown: the hole, and as much of both sides as fits. Oracle: the hole has the true line's
number of tokens. Given: that number rounded up to a multiple of 8, as a user who guesses generously would give; the
model then has room left over. In both cases the answer is what the hole says up to its first line break or
end-of-text; the rest is thrown away. The file with that answer in it is what is judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dlm.data.lines import LineTask, parses
from dlm.errors import UserError

if TYPE_CHECKING:
    from dlm.models.lm import LM

Hole = Literal["oracle", "given"]
ROUND = 8
HOLES: dict[Hole, Callable[[int], int]] = {"oracle": lambda n: n, "given": lambda n: -(-n // ROUND) * ROUND}
CHARACTERS = 16  # a token; only texts longer than this allows are cut before they are tokenised


@dataclass(frozen=True, kw_only=True)
class Window:
    """What the model sees of a task: ids with mask ids in the hole."""

    ids: list[int]
    hole: int
    lead: bool
    """Whether the hole begins with the line break before the line: see `window`."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The verdict on one answer."""

    name: str
    line: str
    answer: str
    exact: bool
    """The file is the original again, character for character."""
    stripped: bool
    """The line is right but for blanks around it."""
    parses: bool


def window(lm: "LM", task: LineTask, length: int, hole: Hole, size: int | None = None) -> Window:
    """The hole with its surroundings, `length` tokens at most: half on either side, more where one side is short.

    The hole has `size` tokens where that is given.

    Tokenizers join a line break with the indentation after it. So where a task leaves the indentation to the model
    (HumanEval's do), the hole begins with that line break; the model is given only that a new line begins.
    """
    tokenizer = lm.require_tokenizer()
    prefix, line = task.prefix, task.line
    body = prefix.rstrip("\r\n") if line[:1].isspace() else prefix
    lead = prefix[len(body) :]
    if hole not in HOLES:
        raise UserError(f"hole = {hole!r}: known hole lengths are {', '.join(HOLES)}")
    reach = CHARACTERS * length
    before, true, after = tokenizer.encode_batch([body[-reach:], lead + line, task.suffix[:reach]], special=False)
    size = HOLES[hole](len(true)) if size is None else size
    if size > length // 2:
        raise UserError(f"{task.name}: a hole of {size} tokens leaves no context in a window of {length}: raise length")
    room = length - size
    left = min(len(before), max(room - room // 2, room - len(after)))
    ids = before[len(before) - left :] + [lm.require_mask_id()] * size + after[: room - left]
    return Window(ids=ids, hole=size, lead=bool(lead))


def answer_of(lm: "LM", tokens: Sequence[int], lead: bool) -> str:
    """The hole's text up to end-of-text or a line break; after the first ones where it had to begin a line."""
    ids = list(tokens)
    if lm.eos_id in ids:
        ids = ids[: ids.index(lm.eos_id)]
    text = lm.decode(ids)
    if lead:
        if text[:1] not in ("\n", "\r"):
            return ""  # it went on with the line before
        text = text.lstrip("\r\n")
    return next(iter(text.splitlines()), "") if text[:1] not in ("\n", "\r") else ""


def grade(task: LineTask, answer: str) -> Grade:
    """Judge one answer."""
    return Grade(
        name=task.name,
        line=task.line,
        answer=answer,
        exact=answer == task.line,
        stripped=answer.strip() == task.line.strip(),
        parses=parses(task.filled(answer)),
    )
