"""Tasks whose answers are programs: HumanEval, MBPP and HumanEval-infilling. Programs run in the sandbox alone.

Prompts and stop strings are lm-eval's; its own task files load the data, and the code that runs programs, from the hub.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dlm.data.lines import LineTask
from dlm.evaluation.programs import Problem, mean_pass_at_k, read_problems
from dlm.evaluation.rate import Rate
from dlm.evaluation.suite.decoded import Decoded, Recording, effort, spent
from dlm.evaluation.suite.decoding_section import DecodingSection
from dlm.evaluation.suite.task_section import TaskSection
from dlm.evaluation.suite.trial import Record, Setting

if TYPE_CHECKING:
    from dlm.inference.decoding import Decoding
    from dlm.inference.request import Generation
    from dlm.models.lm import LM

SHOWN = 3
"""Assertions of a problem that MBPP's prompt shows, and examples before it."""


class Code(Decoded):
    """Programs written from a prompt; pass@k by the unbiased formula."""

    measure = "passed"
    kind: ClassVar[Any] = "humaneval"

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        super().__init__(lm, task, setting)
        setting.sandbox.run("")  # raises here, not after hours of decoding, if this machine has no sandbox
        self.problems = self.chosen(read_problems(task.require("data"), self.kind))[: setting.limit(task)]
        self.names = [problem.name for problem in self.problems]

    def chosen(self, problems: list[Problem]) -> list[Problem]:
        """Those that are asked."""
        return problems

    def truth(self, number: int) -> Any:
        return self.problems[number].prompt, self.problems[number].tail

    def prompt(self, number: int) -> str:
        return self.problems[number].prompt

    def stop(self) -> tuple[str, ...]:
        return ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

    def judge(self, numbers: Sequence[int], answers: "Sequence[Sequence[Generation]]") -> list[Record]:
        texts = [(number, answer.text) for number, several in zip(numbers, answers, strict=True) for answer in several]
        programs = [self.problems[number].program(text) for number, text in texts]
        verdicts = iter(self.setting.sandbox.run_all(programs, self.task.timeout))
        records = []
        for number, several in zip(numbers, answers, strict=True):
            found = [next(verdicts) for _ in several]
            records.append(
                {
                    "item": self.names[number],
                    "passed": sum(verdict.passed for verdict in found) / len(found),
                    "right": sum(verdict.passed for verdict in found),
                    "samples": len(found),
                    "reasons": [verdict.reason for verdict in found],
                    "texts": [answer.text for answer in several],
                    **spent(several),
                }
            )
        return records

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        counts = [(record["samples"], record["right"]) for record in records]
        found: dict[str, Any] = {}
        for k in self.task.k:
            value, error = mean_pass_at_k(counts, k)
            found[f"pass@{k}"] = {"rate": value, "error": error}
        if self.task.samples == 1:
            found["passed"] = Rate.of(record["right"] == 1 for record in records).to_dict()
        return found | effort(records)


class MBPP(Code):
    """The description, three of its assertions, and examples before it as in lm-eval."""

    kind = "mbpp"

    def chosen(self, problems: list[Problem]) -> list[Problem]:
        shots = SHOWN if self.task.shots is None else self.task.shots
        self.shots = problems[:shots]
        return problems[shots:]

    def prompt(self, number: int) -> str:
        shots = [f"{_asked(problem)}{problem.solution}\n[DONE]\n\n" for problem in self.shots]
        return "".join(shots) + _asked(self.problems[number])

    def stop(self) -> tuple[str, ...]:
        return ("[DONE]",)


def _asked(problem: Problem) -> str:
    tests = "".join(f"{test}\n" for test in problem.tests[:SHOWN])
    return (
        f"You are an expert Python programmer, and here is your task: {problem.prompt} Your code should pass these "
        f"tests:\n\n{tests}[BEGIN]\n"
    )


class Infilling(Decoded):
    """Text between a prefix and a suffix: pass@1, exact, and exact but for blanks around it.

    With hole = "fixed" each problem is asked once for every length; figures are the lengths' mean, and each one's.
    """

    infill, measure = True, "passed"

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        super().__init__(lm, task, setting)
        setting.sandbox.run("")
        problems = read_problems(task.require("data"), "infilling", setting.limit(task))
        lengths = task.hole_tokens if task.hole == "fixed" else (None,)
        self.items = [(problem, length) for problem in problems for length in lengths]
        self.names = [problem.name + (f" {length}" if length else "") for problem, length in self.items]
        self.holes = [Hole.of(lm, task, problem, length) for problem, length in self.items]

    def prompt(self, number: int) -> "str | list[int]":
        return self.holes[number].prompt

    def masks(self, number: int) -> int:
        return self.holes[number].size

    @property
    def ranged(self) -> bool:
        """Whether the model chooses the holes' lengths."""
        low, high = self.task.hole_range
        return self.task.hole == "unknown" and low < high

    def decoding(self, number: int, way: DecodingSection, into: Recording | None = None) -> "list[Decoding]":
        """As ever; of a hole without a length only the settings are checked."""
        if not self.ranged:
            return super().decoding(number, way, into)
        self.sampler(number, way)
        return []

    def truth(self, number: int) -> Any:
        problem, length = self.items[number]
        return problem.prompt, problem.solution, problem.tail, length

    def answers(
        self, numbers: Sequence[int], way: DecodingSection, into: Recording | None = None
    ) -> "list[list[Generation]]":
        if not self.ranged:
            return super().answers(numbers, way, into)
        from dlm.inference.generation import fill_all

        config = self.setting.config.engine.with_cache(way.cache)
        found = []
        for number in numbers:  # each has its own settings
            sampler = self.sampler(number, way)
            ids = None if into is None else [into.name(self.names[number])]
            trace = None if into is None else into.store
            found.append(fill_all(self.lm, [self.prompt(number)], sampler, config, trace=trace, request_ids=ids))
        return found

    def judge(self, numbers: Sequence[int], answers: "Sequence[Sequence[Generation]]") -> list[Record]:
        said = [self.holes[n].text(self.lm, several[0]) for n, several in zip(numbers, answers, strict=True)]
        wholes = [self.items[n][0].program(self.holes[n].ending(text)) for n, text in zip(numbers, said, strict=True)]
        verdicts = self.setting.sandbox.run_all(wholes, self.task.timeout)
        records = []
        for number, text, verdict, several in zip(numbers, said, verdicts, answers, strict=True):
            true = self.holes[number].true
            records.append(
                {
                    "item": self.names[number],
                    "passed": verdict.passed,
                    "exact": text == true,
                    "stripped": text.strip() == true.strip(),
                    "reason": verdict.reason,
                    "text": text,
                    "hole": len(several[0].tokens),
                    "length": self.items[number][1],
                    **spent(several[:1]),
                }
            )
        return records

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        measures = ("passed", "exact", "stripped")
        found: dict[str, Any] = {name: Rate.of(record[name] for record in records).to_dict() for name in measures}
        found["hole_tokens"] = sum(record["hole"] for record in records) / len(records)
        if self.task.hole == "fixed":
            found["by_length"] = {
                str(length): {
                    name: Rate.of(r[name] for r in records if r["length"] == length).to_dict() for name in measures
                }
                for length in self.task.hole_tokens
            }
        return found | effort(records)


class Hole:
    """A problem as a model sees it, and how its answer is read."""

    def __init__(self, prompt: "str | list[int]", size: int, lead: bool, true: str, rest: str) -> None:
        self.prompt, self.size, self.lead, self.true, self.rest = prompt, size, lead, true, rest

    @classmethod
    def of(cls, lm: "LM", task: TaskSection, problem: Problem, length: int | None) -> "Hole":
        """The window of `task.length` tokens with the hole in it."""
        from dlm.evaluation.infill import window

        true = problem.solution.rstrip("\n")
        rest = problem.solution[len(true) :]  # the line break behind the hole is shown
        lines = LineTask(name=problem.name, prefix=problem.prompt, line=true, suffix=rest + problem.suffix)
        if task.hole == "unknown":
            low, high = task.hole_range
            shown = window(lm, lines, task.length, "oracle", size=high)
            mask = lm.require_mask_id()
            first = shown.ids.index(mask)
            before, after = (_escaped(lm.decode(ids, False)) for ids in (shown.ids[:first], shown.ids[first + high :]))
            text = f"{before}[MASK:{low}-{high}]{after}" if high > low else f"{before}[MASK:{low}]{after}"
            return cls(text, high, shown.lead, true, rest)
        size = length
        if task.hole == "in_place":
            size = max(1, len(lm.encode(problem.prompt + true)) - len(lm.encode(problem.prompt)))
        shown = window(lm, lines, task.length, "given" if task.hole == "given" else "oracle", size=size)
        return cls(shown.ids, shown.hole, shown.lead, true, rest)

    def text(self, lm: "LM", answer: "Generation") -> str:
        """What was written: to end-of-text; of one line, to its end; without the line break that the hole began with."""
        ids = list(answer.tokens)
        ids = ids[: ids.index(lm.eos_id)] if lm.eos_id in ids else ids
        text = lm.decode(ids)
        if self.lead:
            text = text.lstrip("\r\n") if text[:1] in ("\n", "\r") else ""
        if "\n" not in self.true:
            text = text.partition("\n")[0]
        return text

    def ending(self, text: str) -> str:
        """The text with the line break that stands behind the hole."""
        return text + self.rest


def _escaped(text: str) -> str:
    return text.replace("[MASK", "\\[MASK")
