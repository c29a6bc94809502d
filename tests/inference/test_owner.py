import asyncio
import threading
import time

import pytest

import dlm
from dlm.inference import Full
from dlm.inference.events import Event
from tests.refusals import refused

from .requests import FAMILIES, RULE, prompts, tokens
from .tiny import text_lm, tiny_lm

LONG = {"gen_length": 24, "block_length": 4, "steps": 24}


def test_cancel_from_a_task_ends_one_request_and_no_stream():
    lm = tiny_lm()
    alone = dlm.generate(lm, prompts(4), **LONG)
    engine = dlm.Engine(lm)

    async def run():
        names = [engine.add_request(prompt, **LONG) for prompt in prompts(4)]
        results, ended = {}, []

        async def follow(name):
            async for event in engine.astream_of(name):
                if event.result is not None:
                    results[name] = event.result.tokens
            ended.append(name)

        tasks = [asyncio.create_task(follow(name)) for name in names]
        while not engine.stats().nfe:
            await asyncio.sleep(0.001)
        engine.cancel(names[1])
        await asyncio.gather(*tasks)
        return names, results, ended

    names, results, ended = asyncio.run(run())
    assert sorted(ended) == sorted(names)
    assert results == {name: result.tokens for name, result in zip(names, alone, strict=True) if name != names[1]}
    assert engine.stats().pages_used == 0 and not engine.batch.sequences


def test_cancel_while_all_are_streamed():
    lm = tiny_lm()
    engine = dlm.Engine(lm)

    async def run():
        names = [engine.add_request(prompt, **LONG) for prompt in prompts(3)]
        told = set()
        async for event in engine.astream():
            if event.request_id == names[0] and names[2] in engine.batch.sequences:
                engine.cancel(names[2])
                told.clear()
            told.add(event.request_id)
        return names, told

    names, told = asyncio.run(run())
    assert told == set(names[:2])
    assert engine.stats().pages_used == 0


def test_a_second_thread_that_steps_is_told_so_and_the_first_goes_on():
    inside, free = threading.Event(), threading.Event()

    def on_step(event):
        inside.set()
        assert free.wait(10)

    engine = dlm.Engine(tiny_lm(), on_step=on_step)
    name = engine.add_request([1, 2], gen_length=4, steps=4)
    told = []
    thread = threading.Thread(target=lambda: told.extend(engine.stream()))
    thread.start()
    assert inside.wait(10)
    refused("another thread is stepping this engine", engine.step)
    late = engine.add_request([3], gen_length=4, steps=2)
    gone = engine.add_request([4], gen_length=4, steps=2)
    engine.cancel(gone)
    refused(f"no request '{gone}' is under way", engine.cancel, gone)
    free.set()
    thread.join()
    assert {event.request_id for event in told if event.result} == {name, late}
    assert gone not in {event.request_id for event in told}


def test_on_step_cannot_step_but_may_cancel_and_add():
    errors, added = [], []

    def on_step(event):
        if not added:
            refused("in the middle of a step", engine.step)
            added.append(engine.add_request([2], gen_length=2, steps=1))
            engine.cancel(event.request_ids[0])
            errors.append(event.request_ids[0])

    engine = dlm.Engine(tiny_lm(), on_step=on_step)
    first = engine.add_request([1], gen_length=8)
    assert engine.step() == [] and not engine.owner.inbox and engine.stats().pages_used == 0  # at the end of the step
    assert [event.request_id for event in engine.stream()] == added and errors == [first]


def test_a_request_that_is_cancelled_in_its_last_step_tells_nothing():
    engine = dlm.Engine(tiny_lm(), on_step=lambda event: engine.cancel(event.request_ids[0]))
    name = engine.add_request([1], gen_length=2, steps=1)
    assert engine.step() == [] and not engine.has_work and engine.stats().finished == 0
    assert list(engine.stream_of(name)) == []


def test_one_request_is_followed_while_another_thread_steps():
    lm = text_lm()
    engine = dlm.Engine(lm)
    over = threading.Event()

    def drive():
        while not over.is_set():
            if engine.has_work:
                engine.step()
            else:
                time.sleep(0.001)

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        alone = dlm.generate(lm, ["hello", "what"], gen_length=16, block_length=4)
        names = [engine.add_request(text, gen_length=16, block_length=4) for text in ("hello", "what")]
        events = [list(engine.stream_of(name)) for name in names]
        results = engine.generate(["hello", "what"], gen_length=16, block_length=4)
    finally:
        over.set()
        thread.join()
    assert tokens(results) == tokens(alone)
    for told, result in zip(events, alone, strict=True):
        assert told[-1].result is not None and told[-1].result.tokens == result.tokens
        assert "".join(event.text for event in told) == result.text
    assert [event.text for event in engine.stream_of(names[0])] == [event.text for event in events[0]]  # once more
    refused("no request 'x'", engine.stream_of, "x")


@pytest.mark.parametrize("where", ["on_step", "recorder", "forward", "schedule"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_step_ends_those_that_had_begun_and_nothing_else(where, kind, tmp_path, monkeypatch):
    lm = tiny_lm(**FAMILIES["sdar"])
    alone = dlm.generate(lm, prompts(6), gen_length=8, **RULE)
    fails = [False]

    def once(*_, **__):
        if fails[0]:
            fails[0] = False
            raise kind("the cat")

    with dlm.TraceStore(tmp_path / "t.db") as store:
        on_step = once if where == "on_step" else None
        engine = dlm.Engine(lm, page_size=4, max_num_requests=3, on_step=on_step, trace=store)
        names = [f"r{i}" for i in range(6)]
        for name, prompt in zip(names, prompts(6), strict=True):
            engine.add_request(prompt, gen_length=8, request_id=name, **RULE)
        engine.step()
        begun = [name for name in names if engine.batch.sequences[name].begun]
        waiting = [name for name in names if name not in begun]
        if where == "recorder":
            first = engine.batch.sequences[begun[0]].recorder
            commit = first.commit
            monkeypatch.setattr(first, "commit", lambda *a, **k: (once(), commit(*a, **k)))
        if where == "forward":
            run = engine.batch.stepper.run
            monkeypatch.setattr(engine.batch.stepper, "run", lambda items: (run(items), once())[0])
        if where == "schedule":
            schedule = engine.batch.scheduler.schedule
            monkeypatch.setattr(engine.batch.scheduler, "schedule", lambda: (schedule(), once())[0])
        fails[0] = True
        with pytest.raises(kind):
            engine.step()
        assert engine.stats().pages_used == 0 and len(begun) == 3
        events = list(engine.stream())
        errors = {event.request_id: event.error for event in events if event.error is not None}
        assert sorted(errors) == begun
        assert all(("cat" in error) == (kind is ValueError) for error in errors.values())
        results = {event.request_id: event.result.tokens for event in events if event.result is not None}
        assert results == {name: alone[int(name[1])].tokens for name in waiting}
        store.flush()
        assert {row.request_id for row in store.ls()} == set(waiting)
        assert engine.stats().pages_used == 0 and not engine.has_work
        assert tokens(engine.generate(prompts(6), gen_length=8, **RULE)) == tokens(alone)


def test_what_fails_in_generate_does_not_stay_under_way():
    def on_step(event):
        raise ValueError("no")

    engine = dlm.Engine(tiny_lm(), on_step=on_step)
    refused("no", engine.generate, prompts(3), gen_length=4, error=ValueError)
    assert not engine.has_work and engine.stats().pages_used == 0


def test_a_closed_engine_ends_its_requests_and_takes_no_further_one():
    with dlm.Engine(tiny_lm()) as engine:
        names = [engine.add_request(prompt, **LONG) for prompt in prompts(3)]
        engine.step()
    events = list(engine.stream())
    assert {event.request_id: event.error for event in events} == dict.fromkeys(names, "the engine was closed")
    refused("this engine is closed", engine.add_request, [1], gen_length=4)
    assert not engine.has_work and engine.stats().pages_used == 0
    engine.close()


def test_deadlines_and_a_full_engine():
    engine = dlm.Engine(tiny_lm(), max_num_requests=1, max_waiting=2)
    late = engine.add_request([1], deadline=1e-6, **LONG)
    time.sleep(0.001)
    (event,) = engine.step()
    assert event.request_id == late and event.error == "it was not finished within its deadline, 1e-06 s"
    refused("deadline = 0", engine.add_request, [1], deadline=0)
    engine.add_request([1], **LONG)
    engine.step()
    kept = [engine.add_request([2], **LONG) for _ in range(2)]
    refused("2 requests are waiting, and max_waiting = 2", engine.add_request, [3], error=Full, **LONG)
    engine.cancel(kept[0])
    engine.add_request([3], deadline=60, **LONG)


def test_events_tell_times_and_how_sure_the_model_was(tmp_path):
    lm = tiny_lm(5, spread=0.5)
    with dlm.TraceStore(tmp_path / "t.db", keep=("confidence",)) as store:
        engine = dlm.Engine(lm, trace=store)
        name = engine.add_request([1, 2], gen_length=8, block_length=4, confidence=True)
        plain = engine.add_request([1, 2], gen_length=8, block_length=4)
        events = list(engine.stream())
        store.flush()
        trace = store[name]
    mine = [event for event in events if event.request_id == name]
    sure = [p for event in mine for p in event.confidence]
    assert sure == pytest.approx(trace.confidence[2:].tolist(), rel=1e-3)  # stored in half precision
    assert len(sure) == 8
    assert all(event.confidence is None for event in events if event.request_id == plain)
    times = mine[-1].times
    assert times.queued <= times.started <= times.first_block <= times.done
    assert mine[0].times.first_block == times.first_block and len(mine) > 2


class Growing(list):
    """Events of a log whose other thread adds the last one, and closes it, while they are being read."""

    def __init__(self, log, events, last):
        super().__init__(events)
        self.log, self.last = log, last

    def _grown(self, found):
        last, self.last = self.last, None
        if last is not None:
            self.append(last)
            self.log.closed = True
        return found

    def __len__(self):
        return self._grown(super().__len__())

    def __getitem__(self, at):
        return self._grown(super().__getitem__(at))


@pytest.mark.parametrize("tasks", [False, True])
def test_a_follower_gets_the_event_that_another_thread_adds_as_it_closes_the_log(tasks):
    engine = dlm.Engine(tiny_lm())
    name = engine.add_request([1], gen_length=2, steps=1)
    log = engine.batch.sequences[name].log
    log.events = Growing(log, [], Event(request_id=name, error="the last"))

    async def of_tasks():
        return [event.error async for event in engine.astream_of(name)]

    seen = asyncio.run(of_tasks()) if tasks else [event.error for event in engine.stream_of(name)]
    assert "the last" in seen


def test_generate_ends_with_an_error_where_another_thread_cancels_its_request():
    inside, free, errors = threading.Event(), threading.Event(), []

    def on_step(event):
        inside.set()
        assert free.wait(10)

    def generate():
        refused("request 'mine': it was cancelled", engine.generate, [[1]], request_ids=["mine"], **LONG)
        errors.append("heard of it")

    engine = dlm.Engine(tiny_lm(), on_step=on_step)
    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    assert inside.wait(10)
    engine.cancel("mine")
    free.set()
    thread.join(20)
    assert errors and not engine.has_work and engine.stats().pages_used == 0
