"""What Prometheus reads at /metrics."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dlm.inference.events import Stats
from dlm.serving.choice import Choice

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
RATES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)


class Metrics:
    """Counts and times of one server, in a registry of its own."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self.registry = CollectorRegistry()
        new: Any = {"registry": self.registry}
        self.requests = Counter("dlm_requests", "Requests answered, by status.", ["status"], **new)
        self.queue = Histogram(
            "dlm_queue_seconds", "From a request's arrival to its first step.", buckets=SECONDS, **new
        )
        self.first = Histogram("dlm_first_block_seconds", "From arrival to the first block.", buckets=SECONDS, **new)
        self.whole = Histogram("dlm_request_seconds", "From arrival to the end.", buckets=SECONDS, **new)
        self.between = Histogram("dlm_delta_seconds", "Between two deltas of an answer.", buckets=SECONDS, **new)
        self.tpf = Histogram("dlm_tokens_per_forward", "Tokens of an answer for each forward.", buckets=RATES, **new)
        self.registry.register(_OfEngine(stats))

    def done(self, status: int, seconds: float, choices: Iterable[Choice]) -> None:
        """Count a request that is over."""
        self.requests.labels(str(status)).inc()
        for choice in choices:
            times = choice.times
            if times.started is not None:
                self.queue.observe(max(0.0, times.started - times.queued))
            if times.first_block is not None:
                self.first.observe(max(0.0, times.first_block - times.queued))
            for gap in choice.gaps:
                self.between.observe(gap)
            if choice.nfe:
                self.tpf.observe(len(choice.tokens) / choice.nfe)
            self.whole.observe(seconds)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)


class _OfEngine(Collector):
    """What the engine counts itself, read at each scrape."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self.stats = stats

    def collect(self) -> Iterable[Any]:
        stats = self.stats()
        if stats is None:
            return
        yield GaugeMetricFamily("dlm_running", "Requests that take part in steps.", stats.running)
        yield GaugeMetricFamily("dlm_waiting", "Requests that wait.", stats.waiting)
        yield CounterMetricFamily("dlm_forwards", "Packed forward passes.", stats.nfe)
        yield CounterMetricFamily("dlm_tokens", "Generated tokens of finished requests.", stats.tokens)
        yield CounterMetricFamily("dlm_preemptions", "Requests that lost their pages for a while.", stats.preemptions)
        pages = GaugeMetricFamily("dlm_pages", "Pages of the cache.", labels=["state"])
        for state in ("used", "free", "cached"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
