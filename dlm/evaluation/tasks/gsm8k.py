"""GSM8K (arXiv 2110.14168): word problems whose answer is a number."""

import re
from fractions import Fraction

from dlm.evaluation.answers import NUMBER, answering, marked
from dlm.evaluation.task import Grade, Question, Task

MIXED = re.compile(r"(-?)(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)")


class GSM8K(Task):
    """The final number. 20 % is 20 and 0.2; currency and units do not count."""

    def prompt(self, question: Question) -> str:
        return f"{question.question}\n\nReason step by step, and give the final answer as \\boxed{{}}."

    def grade(self, text: str, question: Question) -> Grade:
        text = re.sub(r"<<[^<>]*>>", "", answering(text))  # GSM8K's calculator notes
        for part in (*marked(text), text):
            numbers = NUMBER.findall(_plain(part))
            if numbers:
                predicted = numbers[-1 if part is text else 0].strip()
                return Grade.of(bool(_values(predicted) & _values(question.answer)), predicted)
        return Grade.of(False, "")


def _plain(text: str) -> str:
    """A text whose numbers read as such: without LaTeX, behind the last equals sign."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r" \1/\2", text)
    after = text.rpartition("=")[2]
    return after if NUMBER.search(after) else text


def _values(text: str) -> set[Fraction]:
    """What a number's text may mean: none where it is no number, two where it ends in a percent sign."""
    bare = re.sub(r"[,$€£%]|^\+", "", text.replace("−", "-")).strip()
    bare = re.sub(r"^-\s+", "-", bare)
    try:
        mixed = MIXED.fullmatch(bare)
        if mixed:
            value = int(mixed[2] or 0) + Fraction(int(mixed[3]), int(mixed[4]))
            value = -value if mixed[1] else value
        else:
            value = Fraction(bare)
    except (ValueError, ZeroDivisionError):  # no number; one of more digits than Python reads
        return set()
    return {value, value / 100} if "%" in text else {value}
