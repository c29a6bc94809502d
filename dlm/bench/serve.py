"""[serve]: requests over HTTP to any server of OpenAI's protocol: open-loop arrivals, a sweep of so many at a time."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np

from dlm.bench.config import BenchConfig, ServeBenchSection
from dlm.bench.finding import Finding, Say, Table
from dlm.bench.load import Poisson
from dlm.errors import UserError
from dlm.serving.client import Client, Refused

HEADINGS = {
    "traffic": "traffic",
    "answered": "answered",
    "refused": "429",
    "failed": "failed",
    "requests_per_second": "answered/s",
    "goodput": "in time/s",
    "throughput": "tokens/s",
    "first_p50": "first block p50, s",
    "first_p95": "p95",
    "first_p99": "p99",
    "between_p50": "between deltas p50, s",
    "between_p95": "p95",
    "between_p99": "p99",
    "whole_p50": "whole p50, s",
    "whole_p95": "p95",
    "whole_p99": "p99",
}
PERCENTILES = (50, 95, 99)


@dataclass(kw_only=True)
class Exchange:
    """One request and its answer, in seconds from the start of its run."""

    due: float
    """When it was to be sent: what a slow client loses counts, too."""
    deltas: list[float] = field(default_factory=list)
    """When each piece of text came."""
    ended: float = 0.0
    tokens: int = 0
    error: str | None = None
    status: int = 200

    @property
    def first(self) -> float:
        return (self.deltas[0] if self.deltas else self.ended) - self.due


def measure(config: BenchConfig, say: Say) -> Finding:
    """Each kind of traffic in turn."""
    section = config.serve or ServeBenchSection()
    client = Client(section.url)
    body = _body(section, client)
    runs = []
    for _ in range(section.warmup):
        _ask(client, section, {**body, "prompt": section.prompts[0]}, Exchange(due=0.0), time.perf_counter())
    for rate in section.rates:
        say(f"{section.requests} requests, Poisson {rate:g}/s")
        runs.append(
            {"traffic": f"Poisson {rate:g}/s", "rate": rate, **_facts(_open(client, section, body, rate), section)}
        )
    for count in section.in_flight:
        say(f"{section.requests} requests, {count} in flight")
        runs.append(
            {
                "traffic": f"{count} in flight",
                "in_flight": count,
                **_facts(_closed(client, section, body, count), section),
            }
        )
    if all(run["answered"] == 0 for run in runs):
        raise UserError(f"{section.url}: no request was answered; the first error: {runs[0]['first_error']}")
    limits = f"In time is a first block within {section.first_within:g} s and an end within {section.whole_within:g} s of arrival."
    text = f"{section.url}, model {body['model']}, {section.max_tokens} tokens. {limits}"
    notes = [_drawn(section, runs)] if section.plot is not None else []
    table = Table(title="Serving", headings=HEADINGS, rows=runs, text=text)
    return Finding(values={"serve": runs}, tables=[table], notes=[note for note in notes if note])


def _body(section: ServeBenchSection, client: Client) -> dict[str, Any]:
    model = section.model or client.model()
    return {
        "model": model,
        "max_tokens": section.max_tokens,
        "temperature": section.temperature,
        "stream_options": {"include_usage": True},
        **section.sampler,
    }


def _open(
    client: Client, section: ServeBenchSection, body: dict[str, Any], rate: float
) -> tuple[list[Exchange], float]:
    """Requests come at random times, whether earlier ones are answered or not: each has a thread."""
    arrivals, started = Poisson(rate, section.seed), time.perf_counter()
    exchanges, threads = [], []
    for number, prompt in enumerate(_prompts(section)):
        due = arrivals.due(number, 0.0, 0) or 0.0
        time.sleep(max(0.0, due - (time.perf_counter() - started)))
        exchanges.append(Exchange(due=due))
        own = {**body, "prompt": prompt, "seed": section.seed + number}
        threads.append(threading.Thread(target=_ask, args=(client, section, own, exchanges[-1], started)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return exchanges, time.perf_counter() - started


def _closed(
    client: Client, section: ServeBenchSection, body: dict[str, Any], count: int
) -> tuple[list[Exchange], float]:
    """The next comes as soon as fewer than `count` are under way."""
    started = time.perf_counter()

    def one(entry: tuple[int, str]) -> Exchange:
        number, prompt = entry
        exchange = Exchange(due=time.perf_counter() - started)
        _ask(client, section, {**body, "prompt": prompt, "seed": section.seed + number}, exchange, started)
        return exchange

    with ThreadPoolExecutor(count) as pool:
        exchanges = list(pool.map(one, enumerate(_prompts(section))))
    return exchanges, time.perf_counter() - started


def _prompts(section: ServeBenchSection) -> Sequence[str]:
    return list(islice(cycle(section.prompts), section.requests))


def _ask(client: Client, section: ServeBenchSection, body: dict[str, Any], exchange: Exchange, started: float) -> None:
    """One request over a stream; what went wrong is noted."""
    path, body = "/v1/completions", dict(body)
    if section.chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": body.pop("prompt")}]
    try:
        for chunk in client.stream(path, body):
            choice = chunk["choices"][0] if chunk.get("choices") else {}
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                exchange.deltas.append(time.perf_counter() - started)
            if chunk.get("usage"):
                exchange.tokens = chunk["usage"]["completion_tokens"]
    except UserError as error:
        exchange.error, exchange.status = str(error), error.status if isinstance(error, Refused) else 0
    exchange.ended = time.perf_counter() - started


def _facts(run: tuple[list[Exchange], float], section: ServeBenchSection) -> dict[str, Any]:
    exchanges, seconds = run
    answered = [one for one in exchanges if one.error is None]
    errors = [one.error for one in exchanges if one.error is not None]
    in_time = [
        one for one in answered if one.first <= section.first_within and one.ended - one.due <= section.whole_within
    ]
    gaps = [late - early for one in answered for early, late in zip(one.deltas, one.deltas[1:], strict=False)]
    refused = sum(one.status == 429 for one in exchanges)
    return {
        "answered": len(answered),
        "refused": refused,
        "failed": len(errors) - refused,
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "requests_per_second": len(answered) / seconds,
        "goodput": len(in_time) / seconds,
        "throughput": sum(one.tokens for one in answered) / seconds,
        **_spread("first", [one.first for one in answered]),
        **_spread("between", gaps),
        **_spread("whole", [one.ended - one.due for one in answered]),
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    values = np.percentile(seconds, PERCENTILES).tolist() if seconds else [None] * len(PERCENTILES)
    return {f"{name}_p{percent}": value for percent, value in zip(PERCENTILES, values, strict=True)}


def _drawn(section: ServeBenchSection, runs: list[dict[str, Any]]) -> str:
    """Latencies over the load, in a file; says where, or why not."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: it needs matplotlib (pip install 'dlm[plot]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds: list[tuple[str, str]] = [("rate", "requests a second"), ("in_flight", "requests in flight")]
    kinds = [(key, words) for key, words in kinds if any(key in run and run["answered"] for run in runs)]
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), squeeze=False, layout="constrained")
    for axis, (key, words) in zip(axes[0], kinds, strict=True):
        own = [run for run in runs if key in run and run["answered"]]
        lines: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
            (f"{part}, p{percent}", lambda run, name=f"{name}_p{percent}": run[name])
            for name, part in (("first", "first block"), ("whole", "whole answer"))
            for percent in PERCENTILES
        ]
        for (label, value), style in zip(lines, ("-", "--", ":") * 2, strict=True):
            colour = "tab:blue" if label.startswith("first") else "tab:orange"
            axis.plot(
                [run[key] for run in own], [value(run) for run in own], style, color=colour, marker=".", label=label
            )
        axis.set_xlabel(words)
        axis.set_ylabel("seconds")
        axis.set_yscale("log")
        axis.grid(alpha=0.25)
    axes[0][0].legend(fontsize=8)
    assert section.plot is not None
    figure.savefig(section.plot, dpi=130)
    pyplot.close(figure)
    return f"drawn: {section.plot}"
