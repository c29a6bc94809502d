"""Held-out lines of Python's standard library, each to be written after what precedes it in its file."""

from collections.abc import Sequence

from dlm.evaluation.task import Grade, Question, Task

CONTEXT = 1200  # characters of a file before the line


class Line(Task):
    """The rest of the line, but for blanks around it. The questions are its own: no file is needed."""

    def questions(self, count: int, seed: int) -> Sequence[Question]:
        from dlm.data.lines import STDLIB, heldout_lines

        return [
            Question(question=line.prefix[-CONTEXT:], answer=line.line, source="stdlib", where=line.name)
            for line in heldout_lines(STDLIB, count, seed)
        ]

    def grade(self, text: str, question: Question) -> Grade:
        predicted = text.partition("\n")[0].strip()
        return Grade.of(predicted == question.answer.strip(), predicted)
