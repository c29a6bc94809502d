"""Single-line infilling: how often the line comes back, and how often the file still parses.

A window of `length` tokens is shown: the hole, and as much of both sides as fits. Oracle: the hole has the true line's
number of tokens. Given: that number rounded up to a multiple of 8, as a user who guesses generously would give; the
model then has room left over. In both cases the answer is what the hole says up to its first line break or
end-of-text; the rest is thrown away. The file with that answer in it is what is judged.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dlm.errors import UserError
from dlm.evaluation.filling import Filling, Tick, fill
from dlm.evaluation.lines import LineTask, parses
from dlm.evaluation.rate import Rate

if TYPE_CHECKING:
    from dlm.models.lm import LM

Hole = Literal["oracle", "given"]
ROUND = 8
HOLES: dict[Hole, Callable[[int], int]] = {"oracle": lambda n: n, "given": lambda n: -(-n // ROUND) * ROUND}
CHARACTERS = 16  # a token; only texts longer than this allows are cut before they are tokenised

RATES = ("exact", "stripped", "parses", "true_parses", "blank_parses")
DEFAULT = Filling(rule="low_confidence")


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


@dataclass(frozen=True, kw_only=True)
class InfillResult:
    """What one way of decoding made of the lines."""

    hole: Hole
    decoding: str
    length: int
    exact: Rate
    stripped: Rate
    parses: Rate
    true_parses: Rate
    """The parse rate of the original texts: what there is to reach."""
    blank_parses: Rate
    """The parse rate with nothing in place of the line: what costs nothing."""
    hole_tokens: float
    nfe: float
    tpf: float
    seconds: float
    grades: tuple[Grade, ...]

    def row(self) -> dict[str, Any]:
        """One line of a table."""
        rates = {name: str(getattr(self, name)) for name in RATES}
        numbers = {"tpf": round(self.tpf, 2), "hole_tokens": round(self.hole_tokens, 1), "lines": self.exact.total}
        return {"hole": self.hole, "decoding": self.decoding, **numbers, **rates}

    def to_dict(self, examples: int = 12) -> dict[str, Any]:
        """Plain values for JSON, with the first few answers."""
        found = {name: value.to_dict() if name in RATES else value for name, value in vars(self).items()}
        del found["grades"]
        return {**found, "examples": [vars(grade) for grade in self.grades[:examples]]}


HEADINGS = {
    "hole": "hole length",
    "decoding": "rule",
    "lines": "lines",
    "hole_tokens": "tokens a hole",
    "tpf": "TPF",
    "exact": "exact (95 %)",
    "stripped": "exact but for blanks",
    "parses": "file parses",
    "blank_parses": "parses, line left empty",
    "true_parses": "parses, true line",
}


def evaluate_infill(
    lm: "LM",
    tasks: Sequence[LineTask],
    *,
    hole: Hole = "oracle",
    decoding: Filling = DEFAULT,
    length: int = 256,
    batch_size: int = 32,
    seed: int = 0,
    tick: Tick | None = None,
) -> InfillResult:
    """Fill each task's line with `dlm.infill` and judge the answers."""
    from dlm.models.required import require_lm

    require_lm(lm, "evaluate_infill()")
    if not tasks:
        raise UserError("no lines to fill in: give at least one task")
    started = time.perf_counter()
    windows = [window(lm, task, length, hole) for task in tasks]
    generations = fill(lm, [w.ids for w in windows], decoding, batch_size=batch_size, seed=seed, tick=tick)
    seconds = time.perf_counter() - started
    answers = [answer_of(lm, g.tokens, w.lead) for g, w in zip(generations, windows, strict=True)]
    grades = tuple(grade(task, answer) for task, answer in zip(tasks, answers, strict=True))
    tokens, nfe = sum(w.hole for w in windows), sum(g.nfe for g in generations)
    return InfillResult(
        hole=hole,
        decoding=decoding.label,
        length=length,
        exact=Rate.of(g.exact for g in grades),
        stripped=Rate.of(g.stripped for g in grades),
        parses=Rate.of(g.parses for g in grades),
        true_parses=Rate.of(parses(task.filled(task.line)) for task in tasks),
        blank_parses=Rate.of(parses(task.filled("")) for task in tasks),
        hole_tokens=tokens / len(tasks),
        nfe=nfe / len(tasks),
        tpf=tokens / nfe,
        seconds=seconds,
        grades=grades,
    )


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
