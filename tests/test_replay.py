"""Recording by the engine, and what a trace and its model allow: verify, force, fork."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import dlm
from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.decoding import continuations
from dlm.inference.recording import listening
from dlm.inference.reference import sample
from dlm.trace import page
from tests.inference.requests import FAMILIES, MASK
from tests.inference.tiny import text_lm, tiny_lm
from tests.refusals import refused

SETTINGS: dict[str, tuple[dict, dict]] = {
    "plain": ({}, {"gen_length": 12, "block_length": 4, "steps": 6}),
    "warm": (
        {},
        {"gen_length": 12, "block_length": 6, "temperature": 1.0, "seed": 3, "rule": "threshold", "threshold": 0.4},
    ),
    "dual": ({}, {"gen_length": 16, "block_length": 4, "cache": "dual", "rule": "threshold", "threshold": 0.4}),
    "guided": ({}, {"gen_length": 8, "cfg_scale": 0.5, "rule": "margin"}),
    "edited": ({}, {"gen_length": 12, "steps": 4, "edit_threshold": 0.25, "remask_threshold": 0.2, "temperature": 1.0}),
    "credit": ({}, {"gen_length": 12, "rule": "credit", "threshold": 0.3}),
    "exact": (FAMILIES["sdar"], {"gen_length": 12, "rule": "threshold", "threshold": 0.4, "temperature": 0.7}),
    "open": (FAMILIES["sdar"], {"gen_length": "auto", "max_gen_length": 12, "rule": "random"}),
    "multi": (FAMILIES["sdar"], {"gen_length": 16, "strategy": "multi_block", "rule": "entropy_threshold"}),
    "causal": (FAMILIES["llama"], {"gen_length": 6}),
}


@pytest.fixture
def store(tmp_path):
    with dlm.TraceStore(tmp_path / "traces.db") as store:
        yield store


def states_of(lm, prompt, **settings) -> list[list[int]]:
    events = []
    dlm.generate(lm, [prompt], on_step=events.append, **settings)
    return [event.canvas[0, : event.lengths[0]].tolist() for event in events]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_state_is_the_one_the_sampler_had(name, store):
    fields, settings = SETTINGS[name]
    lm = tiny_lm(4, spread=0.4, **fields)
    store.keep = ("confidence", "topk", "digests")
    result = dlm.generate(lm, [[1, 2, 3, 4, 5]], trace=store, request_ids=["a"], **settings)[0]
    trace = store["a"]
    trace.check()
    expected = states_of(lm, [1, 2, 3, 4, 5], **settings)
    assert trace.num_steps == len(expected)
    for k, canvas in enumerate(expected, start=1):
        assert trace.state(k)[: trace.length_at(k)].tolist()[: len(canvas)] == canvas
    assert trace.tokens[5 : 5 + len(result.tokens)].tolist() == result.tokens
    assert trace.steps[5 : 5 + len(result.tokens)].tolist() == result.steps
    assert trace.meta["nfe"] == result.nfe and trace.meta["model"] == "tiny"
    made = trace.first_step >= 0
    assert np.isfinite(trace.confidence[: trace.length][made & (trace.first_step < 2**31 - 1)].astype(float)).all()


@pytest.mark.parametrize("name", ["plain", "warm", "guided", "edited", "credit", "exact", "open", "causal"])
def test_the_reference_sampler_leaves_the_trace_the_engine_does(name, store):
    fields, settings = SETTINGS[name]
    lm = tiny_lm(4, spread=0.4, **fields)
    prompts, names = [[1, 2, 3, 4, 5], [7, 8], [9]], ["a", "b", "c"]
    dlm.generate(lm, prompts, trace=store, request_ids=names, **settings)
    theirs = [f"reference {name}" for name in names]
    decodings = continuations(lm, prompts, SamplerConfig(**settings), where="", request_ids=theirs)
    first, mask = decodings[0], lm.mask_id
    requests, how = [d.request for d in decodings], {"mask_id": mask, "keep": ("digests",)}
    recorders = {r.request_id: store.recorder(r.request_id, r.ids, **how) for r in requests}
    on_step = listening(recorders)
    sample(lm.network, requests, first.plan, first.rule, first.settings, first.stop, on_step)
    for name, recorder in zip(names, recorders.values(), strict=True):
        recorder.finish()
        theirs, ours = store[name], store[f"reference {name}"]
        theirs.check()
        ours.check()
        assert [event[:4] for event in ours.events()] == [event[:4] for event in theirs.events()]
        assert np.array_equal(ours.tokens, theirs.tokens[: ours.length]) and ours.num_steps == theirs.num_steps


@pytest.mark.parametrize("name", SETTINGS)
def test_a_rerun_is_identical_and_a_fork_with_nothing_changed_is_the_original(name, store):
    fields, settings = SETTINGS[name]
    lm = tiny_lm(4, spread=0.4, **fields)
    dlm.generate(lm, [[1, 2, 3, 4, 5]], trace=store, request_ids=["a"], **settings)
    trace = store["a"]
    report = dlm.replay.verify(lm, trace)
    assert report.identical and not report.environment, str(report)
    assert str(report) == f"identical at {trace.num_steps} of {trace.num_steps} steps"
    for step in (0, 1, trace.num_steps // 2, trace.num_steps):
        child = dlm.replay.fork(lm, trace, step=step)
        assert np.array_equal(child.states(), trace.states())
        assert child.meta["parent"] == "a" and child.meta["parent_step"] == step and child.request_id != "a"


def test_a_fork_with_another_seed_shares_the_first_states_and_no_more(store):
    lm, trace = forkable(store)
    for step in (0, 5, 11):
        child = dlm.replay.fork(lm, trace, step=step, seed=9)
        assert np.array_equal(child.states()[: step + 1], trace.states()[: step + 1])
        assert not np.array_equal(child.state(step + 1), trace.state(step + 1))
    refused("block_length cannot change in the middle", dlm.replay.fork, lm, trace, step=2, block_length=4)
    refused("step = 17", dlm.replay.fork, lm, trace, step=17)


def test_a_nudged_weight_is_found_at_the_step_and_position_it_tells(store):
    lm = tiny_lm(6, spread=0.4)
    dlm.generate(lm, [[1, 2]], trace=store, request_ids=["a"], gen_length=8, steps=8)
    trace = store["a"]
    target = int(np.flatnonzero(trace.first_step == 4)[0])
    runner = 11 if trace.tokens[target] != 11 else 12
    calls = []

    def lift(module, inputs, logits):
        calls.append(len(logits))
        if len(calls) == 5:  # the fifth step alone: by construction
            logits = logits.clone()
            logits[:, runner] += 50.0
        return logits

    hook = lm.network.lm_head.register_forward_hook(lift)
    report = dlm.replay.verify(lm, trace)
    hook.remove()
    assert not report.identical and report.same_steps == 4
    assert report.actual == runner or report.recorded == trace.tokens[report.position]
    with torch.no_grad():
        lm.network.lm_head.weight[3, 0] += 1e-3
    assert "weights" in dlm.replay.verify(lm, trace).environment


def test_forcing_gives_the_log_probability_of_what_was_committed(store):
    lm = tiny_lm(1, spread=0.4)
    dlm.generate(lm, [[1, 2]], trace=store, request_ids=["a"], gen_length=6, steps=6)
    trace = store["a"]
    forced = dlm.replay.force(lm, trace)
    for position in range(2, 8):
        step = int(trace.steps[position])
        with torch.no_grad():
            p = lm.network(torch.tensor(trace.state(step)[None]).long())[0, position].softmax(-1)
        assert forced.log_probability[position] == pytest.approx(float(p[trace.tokens[position]].log()), abs=5e-3)
    assert np.isnan(forced.log_probability[:2]).all()
    assert forced.total == pytest.approx(np.nansum(forced.log_probability))


def test_so_many_of_the_likeliest_tokens_are_kept_as_were_asked_for(store):
    lm = tiny_lm(3)
    store.keep = ("topk",)
    for store.topk in (1, 9):
        dlm.generate(lm, [[1, 2], [3]], trace=store, request_ids=[f"a{store.topk}", f"b{store.topk}"], gen_length=4)
    few, many = store["a1"], store["a9"]
    made = few.first_step >= 0
    assert few.topk_tokens.shape[1] == 1 and many.topk_tokens.shape[1] == 9
    assert np.array_equal(few.topk_tokens[made, 0], many.topk_tokens[made, 0])
    assert (np.diff(many.topk_logits[made].astype(float)) <= 0).all()
    assert dlm.replay.fork(lm, many, step=1).topk_tokens.shape[1] == 9


def test_holes_are_recorded_and_run_again(store):
    lm = tiny_lm(3)
    dlm.infill(lm, [[1, MASK, MASK, 4, 5, MASK, 7]], trace=store, request_ids=["a"], steps=3)
    trace = store["a"]
    assert trace.state(0).tolist() == [1, MASK, MASK, 4, 5, MASK, 7]
    assert dlm.replay.verify(lm, trace).identical


def test_what_cannot_be_run_again_says_so(store):
    lm = tiny_lm()
    with store.record("foreign", prompt=[1, MASK, MASK], mask_id=MASK) as recorder:
        recorder.step(np.array([1, 2, MASK]))
        recorder.step(np.array([1, 2, 3]))
    refused("does not say how it was sampled", dlm.replay.verify, lm, store["foreign"])


def forkable(store, **settings):
    """A model, and the trace "a" of sixteen steps in which chance decides."""
    lm = tiny_lm(2, spread=0.1)
    settings = {"gen_length": 16, "steps": 16, "temperature": 2.0, **settings}
    dlm.generate(lm, [[1, 2]], trace=store, request_ids=["a"], **settings)
    return lm, store["a"]


def forked(lm, store, parent, step, name, **settings):
    store.put(dlm.replay.fork(lm, store[parent], step=step, request_id=name, **settings)).result()
    return store[name]


CHANGES = {"rule": {"rule": "random"}, "temperature": {"temperature": 0.5}, "seed": {"seed": 9}}
CHANGES |= {"edits": {"edit_threshold": 0.02}, "nothing": {}}


@pytest.mark.parametrize("step", [0, 1, 7, 16])
@pytest.mark.parametrize("change", CHANGES)
def test_a_fork_verifies_under_the_settings_of_each_part(store, change, step):
    lm, _ = forkable(store)
    child = forked(lm, store, "a", step, "b", **CHANGES[change])
    if step < 16 and change != "nothing":
        assert not np.array_equal(child.tokens, store["a"].tokens)
    report = dlm.replay.verify(lm, child)
    assert report.identical and report.same_steps == child.num_steps, str(report)
    assert (report.parent, report.shared_steps, report.shared_check) == ("a", step, "run again")
    assert str(report).startswith(f"identical at {child.num_steps} of {child.num_steps} steps (the first {step} are")


@pytest.mark.parametrize(("first", "second"), [(4, 9), (9, 4), (6, 6), (0, 16), (16, 0)])
def test_a_fork_of_a_fork_verifies(store, first, second):
    lm, _ = forkable(store)
    forked(lm, store, "a", first, "b", temperature=0.5, seed=3)
    child = forked(lm, store, "b", min(second, store["b"].num_steps), "c", rule="margin", seed=4)
    report = dlm.replay.verify(lm, child)
    assert report.identical and report.parent == "b" and report.shared_check == "run again", str(report)


def spoil(trace, step):
    """The trace with another token where `step` committed one."""
    position = int(np.flatnonzero(trace.first_step == step)[0])
    tokens = trace.first_token.copy()
    tokens[position] = 11 if tokens[position] != 11 else 12
    return replace(trace, first_token=tokens), position


@pytest.mark.parametrize("step", [2, 8, 12])
def test_a_tampered_fork_is_found_before_and_after_the_fork(store, step):
    lm, _ = forkable(store)
    forked(lm, store, "a", 5, "b", temperature=0.5)
    child = forked(lm, store, "b", 10, "c", seed=4)
    spoiled, position = spoil(child, step)
    report = dlm.replay.verify(lm, spoiled)
    assert (report.identical, report.same_steps, report.position) == (False, step, position)
    assert f"differs at step {step}, position {position}: recorded {report.recorded}" in str(report)


@pytest.mark.parametrize("step", [0, 5, 16])
def test_another_models_weights_are_found_before_the_fork(store, step):
    lm, _ = forkable(store)
    child = forked(lm, store, "a", step, "b", temperature=0.5)
    report = dlm.replay.verify(tiny_lm(3, spread=0.1), child)
    assert not report.identical and report.same_steps < max(step, 1) and "weights" in report.environment


def test_a_fork_that_does_not_tell_its_parents_settings_asks_the_store_for_the_parent(store):
    lm, _ = forkable(store)
    forked(lm, store, "a", 5, "b", temperature=0.5)
    child = forked(lm, store, "b", 10, "c", seed=4)
    grandparent, parent, child = (
        replace(trace, own={key: value for key, value in trace.own.items() if key != "lineage"})
        for trace in (store["a"], store["b"], child)
    )
    beside = {"a": grandparent, "b": parent, "c": child}
    report = dlm.replay.verify(lm, child, parents=beside)
    assert report.identical and report.shared_check == "run again"
    spoiled, _ = spoil(child, 2)
    assert dlm.replay.verify(lm, spoiled, parents=beside).same_steps == 2
    for known in ({}, {"b": parent}):  # what came before the fork is followed, what came after is judged
        report = dlm.replay.verify(lm, child, parents=known)
        assert report.identical and report.shared_check == "as recorded" and "only followed as recorded" in str(report)
        spoiled, _ = spoil(child, 12)
        assert dlm.replay.verify(lm, spoiled, parents=known).same_steps == 12
    assert dlm.replay.fork(lm, child, step=12).own["lineage"] == [{"steps": 10, "was": None}, {"steps": 12, "was": {}}]
    looped = replace(child, own={**child.own, "parent": "c"})
    assert dlm.replay.verify(lm, looped, parents={"c": looped}).identical


def test_steps_that_other_weights_decided_are_followed(store):
    lm, trace = forkable(store)
    other = tiny_lm(3, spread=0.1)
    child = dlm.replay.fork(other, trace, step=6)
    assert not np.array_equal(child.tokens, trace.tokens)
    bare = replace(child, own={key: value for key, value in child.own.items() if key != "lineage"})
    for fork in (child, bare):  # by the fork itself, or by its parent
        report = dlm.replay.verify(other, fork, parents=store)
        assert report.identical and report.shared_check == "as recorded"


@pytest.mark.parametrize(
    "own", [{"parent_step": 99}, {"parent_step": "x"}, {"parent_step": 3, "lineage": [{"step": 3}]}]
)
def test_a_lineage_that_cannot_be_is_refused(store, own):
    lm, trace = forkable(store)
    with pytest.raises(UserError, match="parent_step = |its lineage cannot be understood"):
        dlm.replay.verify(lm, replace(trace, own={**trace.own, "parent": "z", **own}))


def test_a_fork_shows_its_tokens_as_its_parent_does(store, tmp_path):
    lm = text_lm()
    dlm.generate(lm, ["hello"], gen_length=4, steps=4, trace=store, request_ids=["a"])
    child = dlm.replay.fork(lm, store["a"], step=2, seed=1)
    assert child.text().startswith("hello") and '"text":true' in page(child)
    with dlm.TraceStore(tmp_path / "other.db") as other:  # that never heard of this tokenizer
        other.put(child)
    unread = replace(store["a"], source=None)
    assert dlm.replay.fork(lm, unread, step=2).text().startswith("hello")
