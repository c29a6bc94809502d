"""Answers found in what a model wrote, and short ones compared: boxed, behind ####, in braces of their own, behind "the answer is"; in that order."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator

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
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


def answering(text: str) -> str:
    """The part of a text that answers: behind the thinking, before the next question."""
    return NEXT_QUESTION.split(text.rpartition(THOUGHT)[2], maxsplit=1)[0]


def marked(text: str) -> Iterator[str]:
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
