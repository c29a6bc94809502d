"""Answers found in what a model wrote, and graded by source: GRADERS. Knows no model, no prompt and no file.

A final answer is looked for in the order of MARKS: boxed, behind ####, in braces of its own, behind "the answer is".
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlm.bench.expressions import clean, same

# What a base model goes on with when it has answered: the next question of its own making.
NEXT_QUESTION = re.compile(r"\n\s*(?:#+\s*)?(?:Question|Problem|Q)\s*\d*\s*[:.]", re.IGNORECASE)
THOUGHT = "</think>"
BOX = re.compile(r"\\f?boxed\s*")
HASHES = re.compile(r"####\s*(\S[^\n]*)")
SAYS = re.compile(
    r"\banswer\b(?:[^\S\n]+(?!is\b)[\w'’-]+){0,8}?[^\S\n]*(?:\*\*)?[^\S\n]*(?:\bis\b[^\S\n]*:?|:|=)[^\S\n]*(?:\*\*)?[^\S\n]*(\S[^\n]*)",
    re.IGNORECASE,
)
# A full stop ends a sentence unless an initial or an abbreviation has it: Philip K. Dick, Dr. Smith.
STOP = re.compile(r"(?<!\b[A-Z])(?<!\b(?:Dr|Mr|Ms|St|Jr|Sr|Co|vs|No))(?<!\bMrs)\.(?=\s|$)")
NUMBER = re.compile(
    r"(?<![A-Za-z\d.])(?:(?<![\w)\]}])[-−])?[$€£]?\s?-?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:\s?\d*\s?/\s?\d+(?![\d/]))?(?:\s?%)?"
)
LETTERS = string.ascii_uppercase
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
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


@dataclass(frozen=True)
class Grade:
    """The verdict on one answer; `score` is 0 or 1 where a source knows no half right."""

    correct: bool
    score: float
    predicted: str
    """What was taken for the answer; empty where none was found."""


Grader = Callable[[str, str, Sequence[str]], Grade]
"""(text, gold, choices) -> its grade."""


def grade(text: str, answer: str, source: str, choices: Sequence[str] = ()) -> Grade:
    """Judge `text` by the rules of its source."""
    text = text.rpartition(THOUGHT)[2]
    if source != "line":
        text = NEXT_QUESTION.split(text, maxsplit=1)[0]
    return GRADERS[source](text, answer, choices)


def grade_number(text: str, gold: str, choices: Sequence[str] = ()) -> Grade:
    """GSM8K: the final number."""
    text = re.sub(r"<<[^<>]*>>", "", text)  # GSM8K's calculator notes
    for part in (*_marked(text), text):
        numbers = NUMBER.findall(_plain(part))
        if numbers:
            predicted = numbers[-1 if part is text else 0].strip()
            return _binary(same(predicted, gold), predicted)
    return _binary(False, "")


def grade_expression(text: str, gold: str, choices: Sequence[str] = ()) -> Grade:
    """MATH: the final expression; see `dlm.bench.expressions` for what counts as the same."""
    predicted = next(_marked(text), None)
    if predicted is None:
        inline = re.findall(r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", text, re.DOTALL)
        numbers = NUMBER.findall(text)
        bare = text.strip()
        predicted = "".join(inline[-1]) if inline else numbers[-1] if numbers and len(bare) > 40 else bare
    tail = predicted.rpartition("=")[2] if "=" not in clean(gold) else predicted
    return _binary(any(same(part, gold) for part in (predicted, tail)), predicted.strip())


def grade_choice(text: str, gold: str, choices: Sequence[str] = ()) -> Grade:
    """MMLU: a choice by its letter, its text or, where neither fits, its number from 0."""
    right = choice_of(gold, choices, numbered=True)
    for part in _marked(text):
        chosen = choice_of(part, choices)
        if chosen is not None:
            return _binary(chosen == right, part.strip())
    lines = [line for line in text.strip().splitlines() if line.strip()]
    chosen = choice_of(lines[0], choices) if lines else None
    chosen = _mentioned(text, choices) if chosen is None else chosen
    return _binary(chosen is not None and chosen == right, "" if chosen is None else letter(chosen))


def grade_span(text: str, gold: str, choices: Sequence[str] = ()) -> Grade:
    """HotpotQA: equal once normalised as SQuAD does; the score is the F1 of their words."""
    predicted = next(_marked(text), None)
    if predicted is None:
        lines = [line for line in text.splitlines() if line.strip()]
        predicted = STOP.split(lines[0], maxsplit=1)[0] if lines else ""
    predicted = TEXT.sub(r"\1", predicted)
    got, want = normalise(predicted), normalise(gold)
    return Grade(bool(got) and got == want, f1(got, want), predicted.strip())


def grade_line(text: str, gold: str, choices: Sequence[str] = ()) -> Grade:
    """A line of code: the rest of the line, but for blanks around it."""
    predicted = text.partition("\n")[0].strip()
    return _binary(predicted == gold.strip(), predicted)


GRADERS: dict[str, Grader] = {
    "gsm8k": grade_number,
    "math": grade_expression,
    "math500": grade_expression,
    "mmlu": grade_choice,
    "hotpotqa": grade_span,
    "longbench_hotpotqa": grade_span,
    "line": grade_line,
}


def letter(index: int) -> str:
    """The name of a choice."""
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


def normalise(text: str) -> str:
    """SQuAD's: lower case, without punctuation, articles and extra blanks."""
    kept = "".join(c for c in text.casefold() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", kept).split())


def f1(got: str, want: str) -> float:
    """Of the words of two normalised answers; a yes or no is right or wrong."""
    if got == want:
        return float(bool(got))
    if {got, want} & {"yes", "no", "noanswer"}:
        return 0.0
    first, second = got.split(), want.split()
    common = sum((Counter(first) & Counter(second)).values())
    return 2 * common / (len(first) + len(second)) if common else 0.0


def _marked(text: str) -> Iterator[str]:
    """What the text itself calls its answer, the surest mark first."""
    for find in MARKS:
        found = find(text)
        if found is not None and re.search(r"\w", found):
            yield found


def _boxed(text: str) -> str | None:
    for found in reversed(list(BOX.finditer(text))):
        if text[found.end() : found.end() + 1] == "{":
            inside = _group(text, found.end())
            if inside is not None:
                return inside
        elif text[found.end() - 1 : found.end()].isspace():
            word = re.match(r"[^\s$]+", text[found.end() :])
            return word[0].rstrip(".,") if word else None
    return None


def _hashed(text: str) -> str | None:
    found = HASHES.findall(text)
    return found[-1] if found else None


def _braced(text: str) -> str | None:
    """`{42}` that no LaTeX command, index or power owns; an echo of the instruction's own word is no answer."""
    starts = [found.start() for found in re.finditer(r"(?<![\\\w}\]^_])\{", text)]
    groups = (_group(text, start) for start in reversed(starts))
    return next((g for g in groups if g is not None and g.strip().casefold() not in ("answer", "")), None)


def _said(text: str) -> str | None:
    found = SAYS.findall(text)
    if not found:
        return None
    said = found[-1]
    inline = re.match(r"[^$]{0,40}?(?<!\\)\$([^$]*[A-Za-z\\=^_{}][^$]*|[^$\s][^$]*[^$\s]|[^$\s])\$", said)
    return inline[1] if inline else STOP.split(said, maxsplit=1)[0].strip("* ")


MARKS = (_boxed, _hashed, _braced, _said)


def _group(text: str, start: int) -> str | None:
    """The inside of the brace group that opens at `start`; None where it never closes."""
    depth = 0
    for at in range(start, len(text)):
        escaped = at > 0 and text[at - 1] == "\\"
        depth += 0 if escaped else (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + 1 : at]
    return None


def _plain(text: str) -> str:
    """A text whose numbers read as such: behind the last equals sign, without LaTeX."""
    text = clean(text) if "\\" in text else text
    text = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text.replace("−", "-"))
    after = text.rpartition("=")[2]
    return after if NUMBER.search(after) else text


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


def _binary(correct: bool, predicted: str) -> Grade:
    return Grade(correct, float(correct), predicted)
