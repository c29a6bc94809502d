"""Requests that are asked and written down together: each does what it does alone, whoever stands beside it."""

from dataclasses import replace

import numpy as np
import pytest

import dlm
from dlm.inference.canvases import Canvases
from dlm.inference.events import Event, Times

from .requests import FAMILIES, RULE, ids, prompts
from .test_stop import letters
from .tiny import MASK

PLAIN = [
    {"gen_length": 16, "block_length": 4, "steps": 8, "stop": [*"abcdefghi", "never"]},
    {"gen_length": 16, "block_length": 4, "steps": 12},
    {"gen_length": 24, "block_length": 4, "steps": 12},
    {"gen_length": 8, "block_length": 4, "steps": 6, "rule": "margin"},
    {"gen_length": 12, "block_length": 4, **RULE},
    {"gen_length": 20, "block_length": 4, **RULE},
    {"gen_length": 12, "block_length": 4, "temperature": 0.8, "seed": 2, **RULE},
    {"gen_length": 16, "block_length": 4, "temperature": 0.8, "seed": 3, **RULE},
    {"gen_length": 16, "block_length": 4, "rule": "random", "steps": 8, "seed": 4},
    {"gen_length": 8, "block_length": 4, "rule": "random", "steps": 6, "seed": 5},
]
SPECIAL = [
    {"gen_length": 12, "block_length": 4, "rule": "credit", "threshold": 0.4},
    {"gen_length": 12, "block_length": 4, "strategy": "multi_block", "max_active_blocks": 3, "block_add": 0.3, **RULE},
    {"gen_length": 8, "block_length": 4, "cfg_scale": 0.5, "steps": 8},
    {"gen_length": 8, "block_length": 4, "confidence": True, "rule": "margin", "steps": 8},
]
REVISED = [
    {"gen_length": 12, "block_length": 4, "steps": 9, "edit_threshold": 0.1, "max_post_edit_steps": 2},
    {"gen_length": 12, "block_length": 4, "steps": 9, "remask_threshold": 0.3},
]
KINDS = {"llada": "dual", "Dream": "prefix", "sdar": "exact", "Fast_dLLM_Qwen": "exact", "llama": "exact"}
BLOCKS = {"llada": [8, 16], "Dream": [8]}
"""Lengths of blocks that this family's requests may have beside 4."""


def crowd(family: str) -> list[tuple[list[int], dict]]:
    """Prompts and settings of requests of all sorts, some of which nothing but the prompt sets apart."""
    settings = [*PLAIN, *([SPECIAL[-1]] if family == "llama" else [*SPECIAL, *REVISED])]
    if family == "llama":
        settings = [{k: v for k, v in each.items() if k not in ("block_length", "steps")} for each in settings]
    settings += [{"gen_length": 16, "block_length": size} for size in BLOCKS.get(family, [])]
    asked = list(zip(prompts(len(settings)), settings, strict=True))
    asked += [(ids(70 + i, 5 + i), PLAIN[1 + i % 5]) for i in range(10)]
    if family in BLOCKS:
        asked.append(([*ids(3, 4), MASK, MASK, MASK, 7, 8, MASK, 9], {"infill": True, "block_length": 2, "steps": 4}))
    return asked


def news(events: list[Event]) -> dict[str, list[Event]]:
    """What each request was told, without the hour; a product of more rows may round p otherwise."""
    told: dict[str, list[Event]] = {}
    for event in events:
        result = event.result and replace(event.result, request_id="")
        sure = event.confidence and tuple(round(p, 3) for p in event.confidence)
        facts = {"times": Times(), "cached": 0, "request_id": "", "result": result, "confidence": sure}
        told.setdefault(event.request_id, []).append(replace(event, **facts))
    return told


def written(monkeypatch) -> list[int]:
    """How many requests each step that is written down together has."""
    sizes, write = [], Canvases.write

    def counted(self, commits):
        sizes.append(len(commits.seqs))
        return write(self, commits)

    monkeypatch.setattr(Canvases, "write", counted)
    return sizes


def alone(lm, cache: str, asked: list[tuple[list[int], dict]]) -> list[list[Event]]:
    """What the requests are told that have an engine each, and are asked by themselves since somebody listens to steps."""
    found = []
    for prompt, settings in asked:
        engine = dlm.Engine(lm, cache=cache, page_size=4, on_step=lambda event: None)
        engine.add_request(prompt, **settings)
        (told,) = news(list(engine.stream())).values()
        found.append(told)
    return found


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("room", ["ample", "scarce"])
def test_each_is_told_in_a_crowd_what_it_is_told_alone(family, room, monkeypatch):
    lm, asked = letters(**FAMILIES[family]), crowd(family)
    sizes = written(monkeypatch)
    expected = alone(lm, KINDS[family], asked)
    assert not sizes  # by other means than those that are tested
    assert any(events[-1].result.finish_reason == "stop" for events in expected)
    limits = {"num_pages": 60, "max_num_tokens": 200, "max_num_requests": 16} if room == "scarce" else {}
    engine = dlm.Engine(lm, cache=KINDS[family], page_size=4, **limits)
    events, gone = [], []
    for number, (prompt, settings) in enumerate(asked):
        name = engine.add_request(prompt, **settings)
        if number % 5 == 4:
            events += engine.step()
        if number % 7 == 6:
            gone.append(name)
        if number % 7 == 2 and gone and gone[-1] in engine.batch.sequences:
            engine.cancel(gone[-1])
    told = news([*events, *engine.stream()])
    for number, events in enumerate(expected):
        mine = told.get(str(number), [])
        whole = mine[-1:] and mine[-1].last
        assert mine == events if whole else mine == events[: len(mine)] and str(number) in gone
    assert max(sizes) >= (6 if room == "ample" else 3) and len(told) > len(asked) - 7
    assert engine.batch.scheduler.preemptions > 0 or room == "ample" or KINDS[family] != "exact"
    assert not engine.batch.stepper.canvases.places and engine.stats().pages_used == 0


@pytest.mark.parametrize("settings", [{"refresh_interval": 3}, {"refresh_interval": 8, "cache_delay": 2}])
def test_caches_that_are_filled_anew_after_some_steps(settings, monkeypatch):
    lm, asked = letters(), [(prompt, {"gen_length": 16, "block_length": 8, "steps": 12}) for prompt in prompts(6)]
    sizes = written(monkeypatch)
    for cache in ("dual", "prefix"):
        apart = {"cache": cache, "on_step": lambda event: None, **settings}
        expected = [dlm.generate(lm, [prompt], **apart, **own)[0].tokens for prompt, own in asked]
        assert not sizes
        engine = dlm.Engine(lm, cache=cache, **settings)
        results = engine.generate([prompt for prompt, _ in asked], **asked[0][1])
        assert [result.tokens for result in results] == expected and max(sizes) == 6
        sizes.clear()


def test_who_listens_to_steps_changes_nothing(monkeypatch):
    lm, sizes = letters(**FAMILIES["sdar"]), written(monkeypatch)
    asked = [(prompt, PLAIN[1]) for prompt in prompts(6)]
    expected = alone(lm, "exact", asked)
    engine, heard, events = dlm.Engine(lm, page_size=4), [], []
    for prompt, settings in asked:
        engine.add_request(prompt, **settings)
    while engine.has_work:
        engine.batch.on_step = heard.append if engine.stats().nfe % 2 else None
        events += engine.step()
    assert news(events) == dict(zip("012345", expected, strict=True))
    assert sizes and heard


@pytest.mark.parametrize("family", KINDS)
def test_a_crowd_of_one(family, monkeypatch):
    lm, sizes = letters(**FAMILIES[family]), written(monkeypatch)
    asked = [(prompt, settings) for prompt, settings in crowd(family) if settings in PLAIN]
    expected = alone(lm, KINDS[family], asked)
    engine, told = dlm.Engine(lm, cache=KINDS[family], page_size=4), []
    assert asked and not sizes
    for prompt, settings in asked:
        engine.add_request(prompt, **settings)
        told += news(list(engine.stream())).values()
    assert told == expected and set(sizes) == {1}


def test_a_canvas_that_leaves_keeps_what_it_holds():
    engine = dlm.Engine(letters(), cache="dual", page_size=4)
    canvases, shared = engine.batch.stepper.canvases, []
    for number, prompt in enumerate(prompts(9)):  # one after the other, so that the arrays have to grow
        engine.add_request(prompt, request_id=str(number), **PLAIN[1])
        engine.step()
        seq = engine.batch.sequences[str(number)]
        assert np.shares_memory(seq.canvas.tokens, canvases.tokens)
        shared.append((seq, seq.canvas.tokens.tolist()))
        assert all(seq.canvas.tokens[: len(seq.request.ids)].tolist() == list(seq.request.ids) for seq, _ in shared)
    leaving = shared[3][0]
    engine.cancel("3")
    before = leaving.outcome()
    assert leaving not in canvases.places and not np.shares_memory(leaving.canvas.tokens, canvases.tokens)
    engine.add_request([1, 2, 3], request_id="more", **PLAIN[1])
    list(engine.stream())
    assert leaving.outcome() == before and not canvases.places


def test_pages_are_shared_as_soon_as_they_are_final_and_long_prompts_come_in_pieces(monkeypatch):
    lm, sizes = letters(**FAMILIES["sdar"]), written(monkeypatch)
    slow = {"gen_length": 16, "block_length": 4, "steps": 16}
    short, long = [(ids(number, 8), slow) for number in range(4)], [(ids(9, 70), PLAIN[4])]
    expected = alone(lm, "exact", [*short, *long, *short])
    engine = dlm.Engine(lm, page_size=4, max_num_tokens=48)
    for prompt, settings in short:
        engine.add_request(prompt, **settings)
    events = engine.step()
    assert len(engine.batch.pool.pages) == 4 * 2  # those of all prompts, in the middle of a block
    assert len(events) < 4  # some have nothing to tell yet
    for prompt, settings in [*long, *short]:  # the arrays have to grow for one who is not asked yet
        engine.add_request(prompt, **settings)
    told = news([*events, *(rest := list(engine.stream()))])
    for number, events in enumerate(expected):  # pieces of a prompt are forwards too
        mine = told[str(number)]
        assert [event.tokens for event in mine] == [event.tokens for event in events]
        assert mine[-1].result.steps == events[-1].result.steps
    assert max(sizes) >= 4
    assert all(event.cached == 8 for event in rest if int(event.request_id) > 4)


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_final_is_not_computed_again(count):
    engine = dlm.Engine(letters(**FAMILIES["sdar"]), page_size=4)
    engine.generate([ids(number, 8) for number in range(count)], gen_length=16, block_length=4, steps=16)
    first, others = 8 + 4, 4 + 4  # a block's first step computes the block before it, or the prompt
    assert engine.stats().rows == count * (first + 3 * 4 + 3 * (others + 3 * 4))
