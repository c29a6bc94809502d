"""Arrivals and latencies, on a clock that a fake engine moves: every number can be worked out by hand."""

import math

import numpy as np
import pytest

from dlm.bench.load import InFlight, Poisson, Together, serve, spread
from tests.bench.fake import Clock, FakeEngine
from tests.refusals import refused

SETTINGS = {"gen_length": 4, "block_length": 2}  # two steps a request


def run(prompts, arrivals, settings=SETTINGS, **engine):
    clock = Clock()
    fake = FakeEngine(clock, **engine)
    return serve(fake, prompts, settings, arrivals, clock=clock, sleep=clock.sleep), fake


def test_all_together():
    service, _ = run([[1]] * 3, Together())
    facts = service.facts()
    assert [request.latency for request in service.served] == [2, 2, 2]
    assert [request.first for request in service.served] == [1, 1, 1]
    assert (facts["total_time"], facts["total_tokens"], facts["throughput"]) == (2, 12, 6)
    assert (facts["nfe"], facts["tpf"], facts["forwards"], facts["under_way"]) == (6, 2, 2, 3)


def test_waiting_in_the_engine_counts():
    service, _ = run([[1]] * 2, Together(), room=1)
    assert [request.latency for request in service.served] == [2, 4]
    assert service.served[1].first == 3


def test_one_after_the_other():
    service, fake = run([[1]] * 3, InFlight(1))
    assert [request.arrived for request in service.served] == [0, 2, 4]
    assert [request.latency for request in service.served] == [2, 2, 2]
    assert (service.most, service.seconds, fake.steps) == (1, 6, 6)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_never_more_in_flight(count):
    assert run([[1]] * 7, InFlight(count))[0].most == count


def test_poisson_waits_for_its_times():
    arrivals = Poisson(0.1, seed=3)
    service, _ = run([[1]] * 5, arrivals)
    times = [request.arrived for request in service.served]
    assert times == arrivals.times[:5]
    for request in service.served:
        assert 2 <= request.latency < 5  # a step under way is not interrupted


def test_an_open_loop_does_not_wait_for_answers():
    service, _ = run([[1]] * 40, Poisson(10.0), room=1)
    assert service.most > 20
    assert service.served[-1].latency > 60  # and its queueing is not hidden


def test_poisson_times_are_addressed():
    few, many = Poisson(2.0, seed=5), Poisson(2.0, seed=5)
    many.due(500, 0.0, 0)
    few.due(3, 0.0, 0)
    assert few.times[:4] == many.times[:4]
    assert Poisson(4.0, seed=5).due(3, 0.0, 0) == pytest.approx(few.times[3] / 2)
    assert Poisson(2.0, seed=6).due(3, 0.0, 0) != few.times[3]


def test_poisson_gaps_are_exponential():
    arrivals = Poisson(2.0, seed=1)
    arrivals.due(4000, 0.0, 0)
    gaps = np.diff(arrivals.times[:4000])
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert (gaps > 0.5).mean() == pytest.approx(math.exp(-1), abs=0.03)


def test_failures_are_noted_and_not_counted():
    service, _ = run([[1], [99], [98], [1]], Together())
    assert [request.error for request in service.served] == [None, "it can never fit", "poisoned", None]
    facts = service.facts()
    assert (facts["failed"], facts["total_tokens"], facts["num_prompts"]) == (2, 8, 4)
    refused("every request failed; the first: it can never fit", run, [[99]], Together())
    refused("no requests", run, [], Together())


def test_a_refused_request_does_not_block_a_closed_loop():
    service, _ = run([[99], [1], [99], [1]], InFlight(1))
    assert [request.result is None for request in service.served] == [True, False, True, False]


def test_settings_for_each_request():
    each = [{"gen_length": 2 * n, "block_length": 2} for n in (1, 3)]
    service, fake = run([[1], [1]], Together(), each)
    assert fake.settings == each
    assert [request.latency for request in service.served] == [1, 3]


def test_spread_is_interpolated():
    assert spread([1.0, 2.0, 3.0, 4.0]) == pytest.approx({"mean": 2.5, "p50": 2.5, "p90": 3.7, "p99": 3.97})
    assert spread([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_ticks():
    seen = []
    clock = Clock()
    serve(FakeEngine(clock), [[1]] * 3, SETTINGS, InFlight(1), tick=seen.append, clock=clock, sleep=clock.sleep)
    assert seen == [1, 2, 3]
