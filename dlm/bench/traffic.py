"""[load]: the questions as traffic, one run a rate and a number in flight. Grades nothing."""

from itertools import cycle, islice
from typing import TYPE_CHECKING

from dlm.bench.config import BenchConfig, InferSection, LoadSection
from dlm.bench.finding import Finding, Say, Table
from dlm.bench.infer import MakeEngine, engine_of, settings_of, warm_up
from dlm.bench.load import Arrivals, InFlight, Poisson, serve
from dlm.evaluation.asking import prompt_ids
from dlm.evaluation.questions import load_questions

if TYPE_CHECKING:
    from dlm.models.lm import LM

HEADINGS = {
    "traffic": "traffic",
    "requests_per_second": "answered/s",
    "throughput": "tokens/s",
    "under_way": "under way, most",
    "latency_p50": "latency p50, s",
    "latency_p90": "p90",
    "latency_p99": "p99",
    "first_p50": "first block p50, s",
    "first_p90": "p90",
    "first_p99": "p99",
    "failed": "failed",
}


def measure(config: BenchConfig, lm: "LM", say: Say, make_engine: MakeEngine | None = None) -> Finding:
    """Serve the same prompts under each kind of traffic, each with a fresh engine."""
    s, load, make = config.infer or InferSection(), config.load or LoadSection(), make_engine or engine_of
    limit = load.requests if s.num_samples is None else min(s.num_samples, load.requests)
    questions = load_questions(s.dataset, source=s.source, skip=s.skip_sample, limit=limit, seed=s.seed)
    prompts = list(islice(cycle(prompt_ids(lm, question) for question in questions), load.requests))
    settings = settings_of(lm, s)
    runs = []
    for name, arrivals in kinds(load, s.seed).items():
        say(f"{load.requests} requests, {name}")
        engine = make(lm, config.engine)
        warm_up(engine, prompts[: s.warmup], settings)
        runs.append({"traffic": name, **serve(engine, prompts, settings, arrivals).facts()})
    rows = [
        {
            **run,
            **{f"latency_{part}": run["latency"][part] for part in ("p50", "p90", "p99")},
            **{f"first_{part}": run["time_to_first_block"][part] for part in ("p50", "p90", "p99")},
        }
        for run in runs
    ]
    text = "Latency runs from a request's arrival, waiting included, to its last token."
    return Finding(values={"load": runs}, tables=[Table(title="Load", headings=HEADINGS, rows=rows, text=text)])


def kinds(load: LoadSection, seed: int) -> dict[str, Arrivals]:
    closed: dict[str, Arrivals] = {f"{count} in flight": InFlight(count) for count in load.in_flight}
    return closed | {f"Poisson {rate:g}/s": Poisson(rate, seed) for rate in load.rates}
