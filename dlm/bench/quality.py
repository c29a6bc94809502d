"""[quality]: quality against tokens a forward pass, for every rule, strategy and cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlm.bench.config import BenchConfig, QualitySection
from dlm.bench.finding import Finding, Point, Say, Table
from dlm.bench.front import equal_quality, front
from dlm.bench.infer import MakeEngine, engine_of
from dlm.bench.load import Together, serve
from dlm.bench.trials import TRIALS, Trial, Verdict, options_of
from dlm.errors import UserError
from dlm.evaluation.filling import SCHEDULED
from dlm.models.loading import load

if TYPE_CHECKING:
    from dlm.models.lm import LM

VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    **{rule: tuple({"tokens_per_step": k} for k in (1, 2, 4)) for rule in SCHEDULED},
    "threshold": tuple({"threshold": t} for t in (0.95, 0.8, 0.6, 0.4)),
    "factor": tuple({"factor": f} for f in (0.1, 0.3, 1.0)),
    "entropy_bound": tuple({"gamma": g} for g in (0.01, 0.1, 0.5)),
    "entropy_threshold": tuple({"entropy_threshold": t} for t in (0.1, 0.5, 1.0)),
    "hierarchical": tuple({"threshold": t, "tau_low": low} for t, low in ((0.95, 0.7), (0.8, 0.5), (0.6, 0.3))),
    "credit": tuple({"threshold": t} for t in (0.95, 0.8, 0.6)),
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
    "fresh": "new pairs",
    "throughput": "tokens/s",
    "best": "on the front",
}

TEXT = (
    "right: grids solved, or lines of held-out files that came back exactly. nats: the bound that the model itself gives "
    "what it wrote; repetition lowers it, and shows as fewer new pairs of neighbouring tokens. whole: no blocks. "
    "On the front: no other way has at least its TPF and its quality, as measured."
)


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


def ways(s: QualitySection) -> Iterator[Way]:
    """Everything that is to be compared, in the order of the table. Without blocks there is nothing to cache."""
    for strategy in s.strategies:
        for cache in ("none",) if strategy == "whole" else s.caches:
            for rule in s.rules:
                for variant in VARIANTS[rule]:
                    yield Way(strategy=strategy, cache=cache, rule=rule, variant=variant)


def measure(config: BenchConfig, say: Say, make_engine: MakeEngine | None = None) -> Finding:
    """Tables and points of every way of decoding on every task: a table a model, and strategies at equal quality."""
    s = config.quality or QualitySection()
    values: dict[str, Any] = {"quality": {}}
    tables: list[Table] = []
    points: list[Point] = []
    for name in s.models:
        lm = load(getattr(s, name), dtype=config.model.dtype, device=config.model.device)
        rows: list[dict[str, Any]] = []
        for kind in TRIALS[name]:
            found, drawn = _ways(config, lm, kind(lm, s), make_engine or engine_of, say)
            rows += found
            points += drawn
        values["quality"][name] = rows
        shown = {key: heading for key, heading in HEADINGS.items() if any(row.get(key) is not None for row in rows)}
        tables.append(
            Table(title=f"{name}: quality against tokens a forward pass", headings=shown, rows=rows, text=TEXT)
        )
    equal = equal_quality(points)
    if equal is not None:
        values["equal_quality"] = equal.rows
        tables.append(equal)
    return Finding(values=values, tables=tables, points=points)


def _ways(
    config: BenchConfig, lm: "LM", trial: Trial, make: MakeEngine, say: Say
) -> tuple[list[dict[str, Any]], list[Point]]:
    """The rows of one trial, and their points."""
    s = config.quality or QualitySection()
    say(f"{trial.name}: {len(trial.prompts)} prompts")
    rows: list[dict[str, Any]] = []
    drawn: list[tuple[dict[str, Any], Point]] = []
    for way in ways(s):
        row = _one(config, lm, trial, way, make)
        rows.append(row)
        quality = "  ".join(str(row[key]) for key in trial.measures if key in row)
        say(
            f"  {way.strategy:11s} {way.cache:6s} {way.label:24s} "
            + (row.get("error") or f"TPF {row['tpf']:.2f}  {quality}")
        )
        drawn += [(row, point) for point in _points(trial, row, way)]
    for measure, name in trial.measures.items():
        own = [(row, point) for row, point in drawn if point.panel == _panel(trial, measure)]
        best = front([point for _, point in own])
        for row, point in own:
            if point in best:
                row["best"] = ", ".join(filter(None, (row.get("best"), name)))
    if (truth := trial.truth()) is not None:
        rows.append({"task": trial.name, "strategy": "–", "cache": "–", "rule": "the file itself", **_judged(truth)})
    return rows, [point for _, point in drawn]


def _one(config: BenchConfig, lm: "LM", trial: Trial, way: Way, make: MakeEngine) -> dict[str, Any]:
    """A row of the table; where the engine refuses the way, the row says why."""
    row: dict[str, Any] = {"task": trial.name, "strategy": way.strategy, "cache": way.cache, "rule": way.label}
    seed = (config.quality or QualitySection()).seed
    settings = [options | {"seed": seed} for options in options_of(trial, way.strategy, way.rule, way.variant)]
    try:
        engine = make(lm, config.engine.with_cache(way.cache))
        service = serve(engine, trial.prompts, settings, Together())
    except UserError as error:
        return row | {"right": "not possible", "error": str(error)}
    if len(service.answered) < len(trial.prompts):
        return row | {"right": "failed", "error": next(r.error for r in service.served if r.error is not None)}
    facts = service.facts()
    return row | {
        "tpf": round(facts["tpf"], 3),
        "nfe": round(facts["nfe"] / facts["num_prompts"], 1),
        "throughput": round(facts["throughput"], 1),
        **_judged(trial.judge([result for _, result in service.answered])),
    }


def _judged(verdict: Verdict) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if verdict.right is not None:
        row |= {"right": str(verdict.right), "right_facts": verdict.right.to_dict()}
    if verdict.nats is not None:
        row |= {"nats": str(verdict.nats), "nats_facts": vars(verdict.nats)}
    if verdict.fresh is not None:
        row["fresh"] = round(verdict.fresh, 3)
    return row


def _panel(trial: Trial, measure: str) -> str:
    return f"{trial.name}: {trial.measures[measure]}"


def _points(trial: Trial, row: dict[str, Any], way: Way) -> Iterator[Point]:
    where = {"facet": way.strategy, "series": way.rule, "kind": way.cache, "label": way.label, "tpf": row.get("tpf")}
    if "right" in trial.measures and (rate := row.get("right_facts")):
        yield Point(panel=_panel(trial, "right"), quality=rate["rate"], low=rate["low"], high=rate["high"], **where)
    if "nats" in trial.measures and (nats := row.get("nats_facts")):
        value, error = nats["value"], nats["error"] or 0.0  # of one text it is not known
        ends = {"low": value - error, "high": value + error, "rises": False}
        yield Point(panel=_panel(trial, "nats"), quality=value, **ends, **where)
