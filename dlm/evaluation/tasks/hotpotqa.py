"""HotpotQA (arXiv 1809.09600): questions whose answer is a few words."""

from dlm.evaluation.answers import STOP, TEXT, answering, f1, marked, normalise
from dlm.evaluation.task import Grade, Question, Task


class HotpotQA(Task):
    """Right where equal once normalised; the score is the F1 of the words."""

    def prompt(self, question: Question) -> str:
        return f"{question.question}\n\nAnswer in a few words, given as \\boxed{{}}."

    def grade(self, text: str, question: Question) -> Grade:
        text = answering(text)
        predicted = next(marked(text), None)
        if predicted is None:
            lines = [line for line in text.splitlines() if line.strip()]
            predicted = STOP.split(lines[0], maxsplit=1)[0] if lines else ""
        predicted = TEXT.sub(r"\1", predicted)
        got, want = normalise(predicted), normalise(question.answer)
        return Grade(bool(got) and got == want, f1(got, want), predicted.strip())
