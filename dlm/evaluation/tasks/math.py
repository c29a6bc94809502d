"""MATH (arXiv 2103.03874): problems whose answer is an expression in LaTeX, compared by `math-verify`."""

import re

from dlm.evaluation.algebra import same
from dlm.evaluation.answers import NUMBER, answering, marked
from dlm.evaluation.task import Grade, Question, Task

INLINE = re.compile(r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


class Math(Task):
    """The final expression; see `dlm.evaluation.algebra` for what counts as the same."""

    def prompt(self, question: Question) -> str:
        return f"{question.question}\n\nReason step by step, and give the final answer as \\boxed{{}}."

    def grade(self, text: str, question: Question) -> Grade:
        text = answering(text)
        predicted = next(marked(text), None)
        if predicted is None:
            inline, numbers, bare = INLINE.findall(text), NUMBER.findall(text), text.strip()
            predicted = "".join(inline[-1]) if inline else numbers[-1] if numbers and len(bare) > 40 else bare
        return Grade.of(same(predicted, question.answer), predicted.strip())
