"""The reference sampler's steps: what is committed when, edited, masked again, and told."""

import pytest
import torch

import dlm
from dlm.diffusion.unmask import LowConfidence
from dlm.inference.request import StepEvent

from .requests import of_rule
from .tiny import tiny_lm

MASK = 63


def record(lm, prompts, call=dlm.generate, **settings) -> tuple[list[StepEvent], list[dlm.Generation]]:
    events: list[StepEvent] = []
    results = call(lm, prompts, on_step=events.append, **settings)
    return events, results


def test_events_tell_every_commitment():
    events, results = record(tiny_lm(), [[1, 2], [3, 4, 5]], gen_length=8, block_length=4, steps=4)
    assert [event.step for event in events] == [0, 1, 2, 3]
    assert [event.nfe for event in events] == [1, 2, 3, 4]
    for event in events:
        assert event.request_ids == ("0", "1")
        assert event.prompt_lengths == (2, 3)
        assert event.lengths == (10, 11)
        assert event.committed.sum(-1).tolist() == [2, 2]
        assert not (event.edited | event.remasked).any()
    for row, result in enumerate(results):
        start = (2, 3)[row]
        assert events[-1].canvas[row, start : start + 8].tolist() == result.tokens
        when = [next(e.step for e in events if e.committed[row, start + i]) for i in range(8)]
        assert result.steps == when
        assert max(when[:4]) < min(when[4:])  # block after block


def test_events_add_up_to_the_canvas():
    settings = {"gen_length": 12, "edit_threshold": 0.25, "remask_threshold": 0.2, "temperature": 1.0, "steps": 6}
    events, _ = record(tiny_lm(1), [[1, 2]], **settings)
    canvas = torch.tensor([[1, 2] + [MASK] * 12])
    kinds = {"committed": 0, "edited": 0, "remasked": 0}
    for event in events:
        changed = event.canvas != canvas
        assert not (changed & ~(event.committed | event.edited | event.remasked)).any()
        assert (canvas[event.committed] == MASK).all()
        assert (event.canvas[event.committed] != MASK).all()
        assert (changed[event.edited] & (canvas[event.edited] != MASK) & (event.canvas[event.edited] != MASK)).all()
        assert (event.canvas[event.remasked] == MASK).all()
        for kind in kinds:
            kinds[kind] += int(getattr(event, kind).sum())
        canvas = event.canvas
    assert (canvas != MASK).all()
    assert kinds["committed"] == 12 + kinds["remasked"]
    assert min(kinds.values()) > 0


def test_remasking_is_bounded_and_never_leaves_a_mask():
    events, results = record(tiny_lm(2, spread=0.05), [[1]], gen_length=16, steps=4, remask_threshold=0.99)
    times = torch.stack([event.remasked for event in events]).sum(0)
    assert times.max() == 1
    assert MASK not in results[0].tokens
    assert results[0].nfe <= 2 * 16


def test_editing_converges_or_gives_up():
    quiet, _ = record(tiny_lm(3), [[1]], gen_length=8, edit_threshold=1.0, steps=4)
    assert len(quiet) == 5  # one pass more, which found nothing to change
    none, _ = record(tiny_lm(3), [[1]], gen_length=8, edit_threshold=0.0, steps=4, max_post_edit_steps=0)
    assert len(none) == 4
    settings = {"gen_length": 16, "steps": 1, "edit_threshold": 0.0, "max_post_edit_steps": 3}
    restless, results = record(tiny_lm(5, spread=0.6), [[1]], **settings)
    assert 2 <= len(restless) <= 4
    assert results[0].nfe == len(restless)


def test_an_edited_token_is_the_models_favourite_where_it_stands():
    lm = tiny_lm(4, spread=0.5)
    events, _ = record(lm, [[1, 2]], gen_length=12, steps=1, edit_threshold=0.4)
    before = events[0].canvas
    assert events[1].edited.any()
    p = lm.network(before).softmax(-1)
    p[..., MASK] = 0
    best = p.max(-1)
    expected = (best.indices != before) & (best.values > 0.4) & (torch.arange(14) >= 2)
    assert torch.equal(events[1].edited, expected)
    assert torch.equal(events[1].canvas, torch.where(expected, best.indices, before))


def test_block_causal_forwards_end_with_the_block():
    lm = tiny_lm(model_type="sdar", attention="block_causal", block_length=4)
    events, results = record(lm, [[1, 2, 3, 4, 5]], gen_length=8, steps=4)
    lengths = [event.lengths[0] for event in events]
    assert sorted(set(lengths)) == [8, 12, 16]
    assert lengths == sorted(lengths)
    assert len(results[0].tokens) == 8  # of the 11 that were written


def test_rules_of_ones_own():
    class FromTheLeft(LowConfidence):
        def __call__(self, score, masked, quota):
            return super().__call__(-torch.arange(score.shape[-1]).expand_as(score).float(), masked, quota)

    _, (result,) = record(tiny_lm(), [[1]], gen_length=6, rule=FromTheLeft())
    assert result.steps == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("rule", ["low_confidence", "threshold"])
def test_sure_models_take_fewer_forwards(rule):
    settings = {"gen_length": 16, **of_rule(rule, threshold=0.2)}
    _, (result,) = record(tiny_lm(1, spread=0.6), [[1]], **settings)
    assert (result.nfe == 16) == (rule == "low_confidence")
    assert result.tpf == 16 / result.nfe
