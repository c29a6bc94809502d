"""[quality]: quality against tokens a forward pass, for every rule, strategy and cache. Knows no task's inside."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlm.bench.config import BenchConfig, QualitySection
from dlm.bench.finding import Finding, Point, Say, Table
from dlm.bench.infer import MakeEngine, engine_of
from dlm.bench.load import Together, serve
from dlm.bench.tasks import TASKS, Task, Verdict, options_of
from dlm.errors import UserError
from dlm.evaluation.decoding import SCHEDULED

if TYPE_CHECKING:
    from dlm.models.lm import LM

VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    **{rule: tuple({"tokens_per_step": k} for k in (1, 2, 4)) for rule in SCHEDULED},
    "threshold": tuple({"threshold": t} for t in (0.95, 0.9, 0.7, 0.5)),
    "factor": tuple({"factor": f} for f in (0.1, 0.3, 1.0)),
    "entropy_bound": tuple({"gamma": g} for g in (0.01, 0.1, 0.5)),
    "entropy_threshold": tuple({"entropy_threshold": t} for t in (0.1, 0.5, 1.0)),
    "hierarchical": ({"threshold": 0.9, "tau_low": 0.5}, {"threshold": 0.7, "tau_low": 0.3}),
    "credit": tuple({"threshold": t} for t in (0.9, 0.7)),
}
"""The settings each rule is tried with, the careful ones first."""

HEADINGS = {
    "task": "task",
    "strategy": "strategy",
    "cache": "cache",
    "rule": "rule",
    "tpf": "TPF",
    "nfe": "NFE",
    "right": "right (95 %)",
    "nats": "nats a token ≤",
    "throughput": "tokens/s",
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of decoding."""

    strategy: str
    cache: str
    rule: str
    variant: dict[str, Any]

    @property
    def label(self) -> str:
        """Rule and settings, as the table writes them."""
        words = [f"{value}/step" if key == "tokens_per_step" else f"{value:g}" for key, value in self.variant.items()]
        return f"{self.rule} {' '.join(words)}"

    @property
    def kind(self) -> str:
        """Strategy and cache in words."""
        return self.strategy if self.cache == "none" else f"{self.strategy}, {self.cache}"


def ways(s: QualitySection) -> Iterator[Way]:
    """Everything that is to be compared, in the order of the table."""
    for cache in s.caches:
        for strategy in s.strategies:
            for rule in s.rules:
                for variant in VARIANTS[rule]:
                    yield Way(strategy=strategy, cache=cache, rule=rule, variant=variant)


def measure(config: BenchConfig, say: Say, make_engine: MakeEngine | None = None) -> Finding:
    """Every way on every task: one table, and the points of one plot."""
    import dlm

    s = config.quality or QualitySection()
    rows: list[dict[str, Any]] = []
    points: list[Point] = []
    for name in s.models:
        lm = dlm.load(getattr(s, name), dtype=config.model.dtype, device=config.model.device)
        task = TASKS[name](lm, s)
        say(f"{name}: {len(task.prompts)} prompts")
        for way in ways(s):
            row = _one(config, lm, task, way, make_engine or engine_of)
            rows.append(row)
            say(f"  {way.kind:18s} {way.label:24s} " + (row.get("error") or f"TPF {row['tpf']:.2f}  {row['right']}"))
            points += _points(row, way)
    text = (
        "Right: grids solved, or lines of held-out files that came back exactly. Nats: the bound that the model itself "
        "gives what it wrote. whole: no blocks."
    )
    table = Table(title="Quality against tokens a forward pass", headings=HEADINGS, rows=rows, text=text)
    return Finding(values={"quality": rows}, tables=[table], points=points)


def _one(config: BenchConfig, lm: "LM", task: Task, way: Way, make: MakeEngine) -> dict[str, Any]:
    """A row of the table; where the engine refuses the way, the row says why."""
    row: dict[str, Any] = {"task": task.name, "strategy": way.strategy, "cache": way.cache, "rule": way.label}
    settings = [
        options | {"seed": config.quality.seed if config.quality else 0}
        for options in options_of(task, way.strategy, way.rule, way.variant)
    ]
    if task.infill:
        settings = [options | {"infill": True} for options in settings]
    try:
        engine = make(lm, config.engine.model_copy(update={"cache": way.cache}))
        service = serve(engine, task.prompts, settings, Together())
    except UserError as error:
        return row | {"right": "not possible", "error": str(error)}
    if len(service.answered) < len(task.prompts):
        return row | {"right": "failed", "error": next(r.error for r in service.served if r.error is not None)}
    verdict = task.judge([result for _, result in service.answered])
    return row | _figures(service.facts(), verdict)


def _figures(facts: dict[str, Any], verdict: Verdict) -> dict[str, Any]:
    return {
        "tpf": round(facts["tpf"], 3),
        "nfe": round(facts["nfe"] / facts["num_prompts"], 1),
        "right": str(verdict.right),
        "rate": verdict.right.to_dict(),
        "nats": None if verdict.nats is None else round(verdict.nats, 4),
        "throughput": round(facts["throughput"], 1),
    }


def _points(row: dict[str, Any], way: Way) -> Iterator[Point]:
    if "error" in row:
        return
    rate = row["rate"]
    yield Point(
        panel=f"{row['task']}: share right",
        series=way.rule,
        kind=way.kind,
        tpf=row["tpf"],
        quality=rate["rate"],
        low=rate["low"],
        high=rate["high"],
    )
    if row["nats"] is not None:
        yield Point(
            panel=f"{row['task']}: nats a token", series=way.rule, kind=way.kind, tpf=row["tpf"], quality=row["nats"]
        )
