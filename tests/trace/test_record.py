import inspect

import numpy as np
import pytest

from dlm.config import check
from dlm.trace import Recorder, TraceStore, from_events, from_map, from_states
from dlm.trace.config import TraceConfig
from dlm.trace.events import ACCEPT, MASK, NO_MASK, REJECT, REPLACE, SET
from tests.refusals import refused
from tests.trace.states import states
from tests.trace.synthetic import MASK_ID, run


def test_a_foreign_loop_gives_the_same_states(tmp_path):
    made = run(np.random.default_rng(0), 40, 12, prompt=6, edits=0.05, remasks=0.05)
    with TraceStore(tmp_path / "t.db") as store:
        with store.record("mine", prompt=made.canvases[0][:6], meta={"who": "me"}, keep=("digests",)) as rec:
            for canvas in made.canvases[1:]:
                rec.step(canvas)
        trace = store["mine"]
    np.testing.assert_array_equal(trace.states(), made.padded())
    assert trace.mask_id == MASK_ID  # found by itself
    assert trace.meta == {"who": "me"}
    trace.check()


def test_a_batch_gives_each_row_the_trace_it_has_alone(tmp_path):
    rng = np.random.default_rng(1)
    runs = [run(rng, 24, 6, prompt=4) for _ in range(8)]
    with TraceStore(tmp_path / "t.db") as store:
        with store.record("b", prompt=np.stack([r.canvases[0] for r in runs]), mask_id=MASK_ID) as rec:
            for canvases in zip(*(r.canvases[1:] for r in runs), strict=True):
                rec.step(np.stack(canvases))
        for row, alone in enumerate(runs):
            with store.record(f"alone{row}", prompt=alone.canvases[0], mask_id=MASK_ID) as rec:
                for canvas in alone.canvases[1:]:
                    rec.step(canvas[None])
            batched, single = store[f"b/{row}"], store[f"alone{row}"]
            np.testing.assert_array_equal(batched.states(), alone.padded())
            assert batched.events() == single.events() == alone.trace.events()


def test_tensors_are_taken_as_they_are(tmp_path):
    torch = pytest.importorskip("torch")
    with TraceStore(tmp_path / "t.db") as store:
        canvas = torch.full((1, 6), MASK_ID)
        canvas[:, :2] = torch.tensor([7, 8])
        with store.record("t", prompt=canvas[:, :2]) as rec:
            for position in range(2, 6):
                canvas[:, position] = 10 + position
                rec.step(canvas)
        assert store["t"].tokens.tolist() == [7, 8, 12, 13, 14, 15]
        assert store["t"].steps.tolist() == [-1, -1, 0, 1, 2, 3]
        assert store["t"].state(1).tolist() == [7, 8, 12, MASK_ID, MASK_ID, MASK_ID]


def test_an_error_in_the_loop_stores_nothing(tmp_path):
    with TraceStore(tmp_path / "t.db") as store:

        def fail():
            with store.record("x", prompt=[1]) as rec:
                rec.step([1, 2])
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fail()
        assert "x" not in store


def test_one_step_without_a_mask_in_sight():
    recorder = Recorder("x", [1, 2])
    recorder.step([1, 2, 9, 9])
    trace = recorder.trace()
    assert trace.mask_id == NO_MASK
    assert trace.states().tolist() == [[1, 2, NO_MASK, NO_MASK], [1, 2, 9, 9]]


def test_a_causal_model_grows_token_by_token():
    recorder = Recorder("x", [5, 6], mask_id=None)
    for step, token in enumerate((7, 8)):
        recorder.commit(step, [2 + step], [token])
    trace = recorder.trace()
    assert trace.tokens.tolist() == [5, 6, 7, 8]
    assert [trace.length_at(k) for k in range(3)] == [2, 3, 4]
    assert trace.prompt_length == 2


def test_positions_past_the_end_extend_the_canvas_with_masks():
    recorder = Recorder("x", [1], mask_id=0, length=3)
    recorder.commit(0, np.array([2]), np.array([5]))
    recorder.commit(1, np.array([5]), np.array([6]))
    recorder.commit(2, np.array([1]), np.array([7]), length=8)
    trace = recorder.trace()
    states = [trace.state(k)[: trace.length_at(k)].tolist() for k in range(4)]
    assert states == [[1, 0, 0], [1, 0, 5], [1, 0, 5, 0, 0, 6], [1, 7, 5, 0, 0, 6, 0, 0]]


def test_events_tell_what_happened_in_order():
    recorder = Recorder("x", [1], mask_id=0, length=3, keep="tokens+confidence")
    recorder.commit(0, [1, 2], [5, 6], [ACCEPT, REJECT], confidence=[0.5, 0.25])
    recorder.commit(1, [2], [7], SET, confidence=[0.75])
    recorder.commit(2, [1, 2], [8, 0], [REPLACE, MASK])
    recorder.commit(3, [2], [9])
    trace = recorder.trace()
    assert [tuple(event) for event in trace.events()] == [
        (0, 1, ACCEPT, 5, 0.5),
        (0, 2, REJECT, 6, 0.25),
        (1, 2, SET, 7, 0.75),
        (2, 1, REPLACE, 8, None),
        (2, 2, MASK, 0, None),
        (3, 2, SET, 9, None),
    ]
    assert trace.steps.tolist() == [-1, 0, 3]  # an edit is no commit
    assert trace.states().tolist() == [[1, 0, 0], [1, 5, 0], [1, 5, 7], [1, 8, 0], [1, 8, 9]]


def test_a_step_map_is_the_same_trace_as_its_events():
    made = run(np.random.default_rng(2), 30, 8, prompt=5)
    when = np.array([next((k for k, c in enumerate(made.canvases) if c[i] != MASK_ID), 0) - 1 for i in range(30)])
    final = made.canvases[-1]
    trace = from_map("r", final, np.where(final == MASK_ID, -1, when), MASK_ID, num_steps=8)
    np.testing.assert_array_equal(trace.states(), made.padded())
    recorder = Recorder("r", mask_id=MASK_ID)
    recorder.filled(final, when, 8)
    np.testing.assert_array_equal(recorder.trace().states(), made.padded())


def test_states_of_a_growing_canvas():
    made = run(np.random.default_rng(3), 30, 8, grows=True, edits=0.1)
    trace = from_states("r", made.canvases, MASK_ID)
    assert [trace.length_at(k) for k in range(9)] == [len(canvas) for canvas in made.canvases]
    np.testing.assert_array_equal(trace.states(), made.padded())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recorder("x", keep="tokens+logits"), "cannot keep 'logits'; known: tokens, masks, confidence"),
        (lambda: Recorder("x", [[1], [2]]), r"takes \(l,\) or \(1, l\) ids, not \(2, 1\)"),
        (lambda: from_states("x", [[1, 2], [1]], 0), "shrank from 2 to 1"),
        (lambda: from_map("x", [1, 2], [0], 0), "must be a row each"),
        (lambda: from_map("x", [1, 2], [0, 5], 0, num_steps=3), "a token of step 5, but num_steps = 3"),
        (lambda: event(REPLACE), "revises position 0, which has no token"),
        (lambda: event(SET, step=4), "must come step by step, from 0 to 1"),
    ],
)
def test_what_is_refused(make, message):
    refused(message, make)


def event(kind: int, step: int = 0):
    columns = np.array([[step], [0], [kind], [5]])
    return from_events("x", np.array([0, 0]), columns, mask_id=0, num_steps=2)


def test_defaults_are_the_stores():
    config, store = TraceConfig(), inspect.signature(TraceStore).parameters
    for name in ("durability", "fraction", "prompts", "queue_size"):
        assert getattr(config, name) == store[name].default


@pytest.mark.parametrize("value", ["tokens+logits", ""])
def test_granularity_is_checked(value):
    refused("cannot keep .*; known: tokens, masks", check, TraceConfig, {"keep": value}, "x.toml")


def test_every_state_of_engine_and_dice_comes_back():
    assert states(15)["traces"] == 15
