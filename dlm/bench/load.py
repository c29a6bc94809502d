"""Requests arriving at an engine, all at once, at random times or so many at a time; and when each was answered."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dlm.errors import UserError

if TYPE_CHECKING:
    from dlm.inference.request import Generation


class Engine(Protocol):
    """The part of `dlm.Engine` that is used here."""

    def add_request(self, prompt: Any, **settings: Any) -> str: ...
    def step(self) -> Sequence[Any]: ...
    @property
    def has_work(self) -> bool: ...
    def stats(self) -> Any: ...


class Arrivals(Protocol):
    """When requests come."""

    def due(self, number: int, now: float, under_way: int) -> float | None:
        """When request `number` comes, in seconds from the start; None while it waits for another to end."""
        ...


@dataclass(frozen=True)
class Together:
    """All at the start."""

    def due(self, number: int, now: float, under_way: int) -> float | None:
        return 0.0


@dataclass(frozen=True)
class InFlight:
    """A closed loop: the next comes as soon as fewer than `count` are under way."""

    count: int

    def due(self, number: int, now: float, under_way: int) -> float | None:
        return now if under_way < self.count else None


@dataclass(frozen=True)
class Poisson:
    """An open loop: `rate` requests a second come at random, whether earlier ones are answered or not.

    The gap before request i depends on the seed and i alone: a higher rate is the same traffic, faster.
    """

    rate: float
    seed: int = 0
    times: list[float] = field(default_factory=list, compare=False)

    def due(self, number: int, now: float, under_way: int) -> float | None:
        if number >= len(self.times):
            # One uniform a gap (inverse CDF): more requests leave the first ones' times as they are.
            draw = np.random.Generator(np.random.Philox(self.seed))
            gaps = -np.log1p(-draw.random(2 * number + 64)) / self.rate
            self.times[:] = np.cumsum(gaps).tolist()
        return self.times[number]


@dataclass(kw_only=True)
class Served:
    """One request, in seconds from the start."""

    request_id: str
    arrived: float
    """When it came, not when the engine had time to take it: waiting counts."""
    block_length: int | None = None
    """Tokens of its first block; None: whatever comes first."""
    tokens: int = 0
    """That are final so far."""
    first: float | None = None
    """When its first block was final."""
    finished: float | None = None
    result: "Generation | None" = None
    error: str | None = None

    @property
    def latency(self) -> float:
        assert self.finished is not None
        return self.finished - self.arrived


@dataclass(frozen=True, kw_only=True)
class Service:
    """What became of all requests; `served` is in the order of the prompts."""

    served: list[Served]
    seconds: float
    """From the first arrival to the last end."""
    forwards: int
    """Packed forward passes of the engine."""
    most: int
    """Requests under way at a time, at most."""

    @property
    def answered(self) -> "list[tuple[Served, Generation]]":
        return [(request, request.result) for request in self.served if request.result is not None]

    @property
    def tokens(self) -> int:
        """Generated, up to and including end-of-text."""
        return sum(len(result.tokens) for _, result in self.answered)

    @property
    def nfe(self) -> int:
        """Forward passes the requests took part in, each counted for itself."""
        return sum(result.nfe for _, result in self.answered)

    def facts(self) -> dict[str, Any]:
        latencies = [request.latency for request, _ in self.answered]
        firsts = [request.first - request.arrived for request, _ in self.answered if request.first is not None]
        return {
            "total_time": self.seconds,
            "total_tokens": self.tokens,
            "throughput": self.tokens / self.seconds,
            "requests_per_second": len(latencies) / self.seconds,
            "num_prompts": len(self.served),
            "failed": len(self.served) - len(latencies),
            "nfe": self.nfe,
            "tpf": self.tokens / max(self.nfe, 1),
            "forwards": self.forwards,
            "under_way": self.most,
            "latency": spread(latencies),
            "time_to_first_block": spread(firsts),
        }


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles (interpolated); None of nothing."""
    if not seconds:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    values = np.percentile(seconds, [50, 90, 99]).tolist()
    return {"mean": float(np.mean(seconds)), **dict(zip(("p50", "p90", "p99"), values, strict=True))}


def serve(
    engine: Engine,
    prompts: Sequence[Any],
    settings: dict[str, Any] | Sequence[dict[str, Any]],
    arrivals: Arrivals,
    *,
    tick: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Service:
    """Put every prompt to the engine as `arrivals` has it, and step until all have ended.

    `settings` are those of `dlm.Engine.add_request`, for all prompts or one for each. A prompt that the engine refuses, and a request that fails in it, are noted as such; raises UserError when all do.
    """
    started, before = clock(), engine.stats().nfe
    served: list[Served] = []
    under_way: dict[str, Served] = {}
    most = 0
    while len(served) < len(prompts) or under_way:
        due: float | None = None
        while len(served) < len(prompts):
            now = clock() - started
            due = arrivals.due(len(served), now, len(under_way))
            if due is None or due > now:
                break
            number = len(served)
            own = settings if isinstance(settings, dict) else settings[number]
            request = Served(request_id=str(number), arrived=due, block_length=own.get("block_length"))
            served.append(request)
            try:
                engine.add_request(prompts[number], request_id=request.request_id, **own)
                under_way[request.request_id] = request
            except UserError as error:
                request.error, request.finished = str(error), now
        most = max(most, len(under_way))
        if engine.has_work:
            for event in engine.step():
                _note(event, under_way, clock() - started)
                if event.request_id not in under_way and tick is not None:
                    tick(len(served) - len(under_way))
        elif under_way:
            raise RuntimeError(f"the engine has no work, and requests {', '.join(under_way)} have not ended")
        elif due is not None and (pause := due - (clock() - started)) > 0:
            sleep(pause)
    _require_one(served)
    first, last = min(request.arrived for request in served), max(request.finished or 0.0 for request in served)
    forwards = engine.stats().nfe - before
    return Service(served=served, seconds=max(last - first, 1e-9), forwards=forwards, most=most)


def _note(event: Any, under_way: dict[str, Served], now: float) -> None:
    request = under_way[event.request_id]
    request.tokens += len(event.tokens)
    whole = event.result is not None or request.tokens >= (request.block_length or 1)
    if whole and event.error is None and request.first is None:
        request.first = now
    if event.result is not None or event.error is not None:
        request.finished, request.result, request.error = now, event.result, event.error
        del under_way[event.request_id]


def _require_one(served: Sequence[Served]) -> None:
    if not served:
        raise UserError("no requests to serve: give at least one prompt")
    if all(request.result is None for request in served):
        raise UserError(f"every request failed; the first: {served[0].error}")
