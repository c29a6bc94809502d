"""A dataset's questions answered twice, by the engine and by plain decoding: speed, accuracy, and equal tokens.

The report's keys are those of BlockInfer's benchmark, and more.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlm.bench.comparison import agreement, compare, notes_of, tables_of
from dlm.bench.config import BenchConfig, InferSection
from dlm.bench.finding import Finding, Say
from dlm.bench.load import Arrivals, Engine, InFlight, Service, Together, serve
from dlm.bench.peak import Peak
from dlm.errors import UserError
from dlm.evaluation.asking import prompt_ids
from dlm.evaluation.questions import grade, load_questions, sources
from dlm.evaluation.task import Grade, Question
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.readers import READ_BY, SAMPLER_READERS

if TYPE_CHECKING:
    from dlm.models.lm import LM

MakeEngine = Callable[["LM", EngineConfig], Engine]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way of answering all questions."""

    name: str
    service: Service
    grades: list[Grade | None]
    """None where there is nothing to grade."""
    peak: int

    @property
    def facts(self) -> dict[str, Any]:
        facts = self.service.facts()
        return {
            "implementation": self.name,
            **facts,
            "avg_latency": facts["total_time"] / facts["num_prompts"],
            **_marks(self.grades),
            "peak_memory_mib": self.peak / 2**20,
        }


@dataclass(frozen=True, kw_only=True)
class Quiz:
    """Questions, and the model that answers them."""

    config: BenchConfig
    lm: "LM"
    questions: Sequence[Question]
    prompts: Sequence[list[int]]
    make: MakeEngine
    say: Say

    def run(self, name: str, cache: str | None, settings: dict[str, Any], arrivals: Arrivals) -> Run:
        """Answer all questions with a fresh engine, under its own cache or another."""
        engine = self.engine(cache)
        warm_up(engine, self.prompts[: (self.config.infer or InferSection()).warmup], settings)

        def tick(done: int) -> None:
            if done % 10 == 0:
                self.say(f"{name}: {done}/{len(self.prompts)}")

        with Peak(self.lm.device) as peak:
            service = serve(engine, self.prompts, settings, arrivals, tick=tick)
        texts = [served.result.text if served.result else "" for served in service.served]
        grades = [grade(text, question) for text, question in zip(texts, self.questions, strict=True)]
        return Run(name=name, service=service, grades=grades, peak=peak.bytes)

    def engine(self, cache: str | None = None) -> Engine:
        return self.make(self.lm, self.config.engine if cache is None else self.config.engine.with_cache(cache))

    def agreement(self, ours: Service, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """How often the same settings give the same tokens without a cache, and one at a time."""
        settings = settings_of(self.lm, self.config.infer or InferSection())
        return {
            "cached_vs_uncached": agreement(ours, serve(self.engine("none"), prompts, settings, Together())),
            "batched_vs_single": agreement(ours, serve(self.engine(), prompts, settings, InFlight(1))),
        }


def measure(config: BenchConfig, lm: "LM", say: Say, make_engine: MakeEngine | None = None) -> Finding:
    """Answer with the engine and by plain decoding, and compare; `make_engine` is `dlm.Engine.of` unless given."""
    s = config.infer or InferSection()
    questions = load_questions(s.dataset, source=s.source, skip=s.skip_sample, limit=s.num_samples, seed=s.seed)
    prompts = [prompt_ids(lm, question) for question in questions]
    quiz = Quiz(config=config, lm=lm, questions=questions, prompts=prompts, make=make_engine or engine_of, say=say)
    kinds = ", ".join(f"{count} {name or 'without source'}" for name, count in sources(questions).items())
    say(f"{len(questions)} questions ({kinds})")
    runs = [quiz.run("engine", None, settings_of(lm, s), Together())]
    values: dict[str, Any] = {"blockinfer": runs[0].facts}
    if not s.skip_vanilla:
        runs.append(quiz.run("vanilla", "none", vanilla_of(lm, s), InFlight(1)))
        facts = runs[1].facts
        values |= {"vanilla_llada": facts, "comparison": compare(runs[0].facts, facts)}
    values["sources"] = {
        name: {
            run.name: _marks([g for g, q in zip(run.grades, questions, strict=True) if q.source == name])
            for run in runs
        }
        for name in sources(questions)
    }
    if s.compared:
        say(f"repeating {min(s.compared, len(prompts))} questions uncached, and one at a time")
        values["agreement"] = quiz.agreement(runs[0].service, prompts[: s.compared])
    values["samples"] = [_sample(i, question, runs) for i, question in enumerate(questions[: s.shown])]
    return Finding(values=values, tables=tables_of(values), notes=notes_of(values))


def engine_of(lm: "LM", config: EngineConfig) -> Engine:
    from dlm.inference.engine import Engine

    return Engine.of(lm, config)


def settings_of(lm: "LM", s: InferSection) -> dict[str, Any]:
    """The sampler's settings for each question."""
    from dlm.inference.plan import Plan

    block = Plan(config=lm.config, block_length=s.block_length).length_of_block(s.max_tokens)
    steps = (s.denoising_steps or block) * max(1, s.max_tokens // block)
    named = {name: getattr(s, name) for name in ("rule", "temperature", "strategy", "seed")}
    if s.rule in READ_BY["threshold"] or s.threshold != InferSection().threshold:
        named["threshold"] = s.threshold
    return {"gen_length": s.max_tokens, "block_length": block, "steps": steps, **named, **s.sampler}


def vanilla_of(lm: "LM", s: InferSection) -> dict[str, Any]:
    """The same question to plain decoding. Only bidirectional families can denoise a whole answer at once."""
    settings = settings_of(lm, s) | {"strategy": "block"}
    if s.vanilla == "one_block" and lm.config.attention == "bidirectional":
        settings |= {"block_length": s.max_tokens, "steps": s.max_tokens, "rule": "low_confidence"}
    return {name: value for name, value in settings.items() if _read(name, settings)}


def _read(name: str, settings: dict[str, Any]) -> bool:
    reader = SAMPLER_READERS.get(name)
    return reader is None or reader.reads(SamplerConfig(**settings))


def warm_up(engine: Engine, prompts: Sequence[list[int]], settings: dict[str, Any]) -> None:
    """Serve prompts uncounted; backwards, so that no page of them is found again."""
    if prompts:
        with suppress(UserError):  # all refused: they are refused again, and counted, when they are measured
            serve(engine, [prompt[::-1] for prompt in prompts], settings, Together())


def _marks(grades: Sequence[Grade | None]) -> dict[str, float | int]:
    graded = [g for g in grades if g is not None]
    correct = sum(g.correct for g in graded)
    return {
        "correct": correct,
        "total": len(graded),
        "accuracy": 100 * correct / len(graded) if graded else 0.0,
        "score": 100 * sum(g.score for g in graded) / len(graded) if graded else 0.0,
    }


def _sample(number: int, question: Question, runs: Sequence[Run]) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "question": question.question[-300:],
        "answer": question.answer,
        "source": question.source,
    }
    for run in runs:
        result, verdict = run.service.served[number].result, run.grades[number]
        graded = {} if verdict is None else {"predicted": verdict.predicted, "correct": verdict.correct}
        sample[run.name] = {"text": "" if result is None else result.text, **graded}
    return sample
