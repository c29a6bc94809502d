import signal

import pytest

import dlm
from dlm.inference import Interrupted
from dlm.inference.batch import Batch
from tests.inference.tiny import MASK, text_lm, tiny_lm
from tests.refusals import refused

from . import interrupts
from .requests import prompts
from .stress import Stress


def at(step: int):
    """An `on_step` during whose `step`-th call (from 1) Ctrl-C comes."""
    calls = []

    def on_step(event) -> None:
        calls.append(event)
        if len(calls) == step:
            raise KeyboardInterrupt

    return on_step


def test_what_was_decided_is_handed_over():
    lm = text_lm()
    whole = dlm.generate(lm, "hello", gen_length=16, steps=16, seed=1)[0]
    with pytest.raises(KeyboardInterrupt) as caught:
        dlm.generate(lm, "hello", gen_length=16, steps=16, seed=1, on_step=at(6))
    assert isinstance(caught.value, Interrupted)
    (partial,) = caught.value.results
    assert (partial.finish_reason, partial.nfe) == ("interrupted", 6)
    decided = [i for i, step in enumerate(whole.steps) if step < 5]  # the sixth was decided, and not written down
    assert [i for i, token in enumerate(partial.tokens) if token != MASK] == decided
    assert len(partial.tokens) == decided[-1] + 1 and partial.text.count("░") == len(partial.tokens) - 5
    assert [partial.tokens[i] for i in decided] == [whole.tokens[i] for i in decided]
    assert [step for step in partial.steps if step >= 0] == [whole.steps[i] for i in decided]


def test_holes_are_shown_in_their_text():
    with pytest.raises(Interrupted) as caught:
        dlm.infill(text_lm(), "a[MASK:3]b[MASK:2]c", on_step=at(3))
    (partial,) = caught.value.results
    assert partial.text[0] == "a" and partial.text[-1] == "c" and partial.text.count("░") == 3
    assert len(partial.tokens) == 5 and partial.tpf == pytest.approx(2 / 3)


def test_before_the_first_step_there_is_nothing(monkeypatch):
    def step(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Batch, "step", step)
    with pytest.raises(Interrupted) as caught:
        dlm.generate(text_lm(), "hello", gen_length=4)
    assert caught.value.results == []


def test_finished_requests_stay_and_an_engine_goes_on(tmp_path):
    lm = tiny_lm()
    with dlm.TraceStore(tmp_path / "t.db") as store:
        engine = dlm.Engine(lm, trace=store, max_num_requests=1, on_step=at(6))
        engine.add_request([5], gen_length=2, steps=2, request_id="other")
        with pytest.raises(Interrupted) as caught:
            engine.generate([[1], [2], [3]], gen_length=4, steps=2, request_ids=["a", "b", "c"])
        found = [(r.request_id, r.finish_reason) for r in caught.value.results]
        assert found == [("a", "length"), ("b", "interrupted")]
        assert not engine.batch.sequences and engine.stats().pages_used == 0
        assert [event.request_id for event in engine.step() if event.result is not None] == ["other"]
        assert [result.request_id for result in engine.generate([[4]], gen_length=2, request_ids=["d"])] == ["d"]
        assert {row.request_id for row in store.ls()} == {"a", "other", "d"}


def test_all_or_none_are_submitted(tmp_path):
    lm = tiny_lm()
    with dlm.TraceStore(tmp_path / "t.db") as store:
        dlm.generate(lm, [[1]], gen_length=2, trace=store, request_ids=["taken"])
        steps = []
        with pytest.raises(dlm.UserError, match=r"'taken': the store has one .*overwrite=True of TraceStore"):
            dlm.generate(lm, [[1]] * 2, gen_length=2, trace=store, request_ids=["new", "taken"], on_step=steps.append)
        assert steps == [] and "new" not in store
        engine = dlm.Engine(lm, trace=store)
        refused("already under way", engine.generate, [[1]] * 2, gen_length=2, request_ids=["new", "new"])
        assert not engine.has_work
    with dlm.TraceStore(tmp_path / "t.db", overwrite=True) as store:
        dlm.generate(lm, [[2]], gen_length=2, trace=store, request_ids=["taken"])
        assert store["taken"].state(0)[0] == 2


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_everybody_calls_one_engine(family):
    stress = Stress(family, deeds=80, seed=1)
    counted = stress.run()
    assert stress.failures == [] and counted["texts"] > 20


def test_an_interrupt_at_any_line_leaves_an_engine_that_goes_on():
    counted = interrupts.run(40, seed=2)
    assert counted["interrupted"] > 20
    assert not any(counted[kind] for kind in ("wrong", "stuck", "lost", "leak"))


def test_a_signal_waits_for_the_end_of_the_step():
    lm, slowly = tiny_lm(), {"gen_length": 24, "block_length": 4, "steps": 24}
    alone = dlm.generate(lm, prompts(2), **slowly)
    engine = dlm.Engine(lm, on_step=lambda event: event.step == 3 and signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        names = [engine.add_request(prompt, **slowly) for prompt in prompts(2)]
        events = []
        with pytest.raises(KeyboardInterrupt):
            events.extend(engine.stream())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        events += engine.stream()
    finally:
        signal.signal(signal.SIGINT, before)
    results = {event.request_id: event.result.tokens for event in events if event.result is not None}
    assert results == {name: result.tokens for name, result in zip(names, alone, strict=True)}
