import asyncio
import random

import pytest
import torch

import dlm
from dlm.errors import UserError
from dlm.inference.pages import PagePool
from tests.refusals import refused

from .requests import FAMILIES, MASK, MIXED, RULE, ids, prompts, tokens
from .tiny import text_lm, tiny_lm


def test_a_prompt_longer_than_a_forward_is_read_in_pieces():
    lm = tiny_lm(1, **FAMILIES["sdar"])
    prompt = ids(4, 57)
    whole = dlm.generate(lm, [prompt], gen_length=8, **RULE)[0]
    for budget in (16, 18):  # the second is no multiple of the attention's blocks
        engine = dlm.Engine(lm, max_num_tokens=budget, page_size=4)
        assert engine.generate([prompt], gen_length=8, **RULE)[0].tokens == whole.tokens
        assert engine.stats().nfe > whole.nfe


def test_prompts_that_begin_alike_share_their_pages():
    lm = tiny_lm(1, **FAMILIES["sdar"])
    shared = ids(1, 40)
    alone = [dlm.generate(lm, [[*shared, token]], gen_length=8)[0].tokens for token in (1, 2)]
    engine = dlm.Engine(lm, page_size=4)
    first = engine.generate([[*shared, 1]], gen_length=8)
    before = engine.stats()
    assert before.pages_cached >= 10 and before.pages_used == 0
    second = engine.generate([[*shared, 2]], gen_length=8)
    assert tokens([*first, *second]) == alone
    assert engine.stats().rows - before.rows < before.rows - 30
    both = engine.add_request([*shared, 1], gen_length=8), engine.add_request([*shared, 2], gen_length=8)
    engine.step()
    assert engine.stats().pages_used < 2 * 11
    for name in both:
        engine.cancel(name)
    assert engine.stats().pages_used == 0


def test_when_room_is_needed_the_end_of_a_prompt_goes_first():
    lm = tiny_lm()
    pool = PagePool(lm.network, 3, 4, lm.device, lm.dtype)
    pages = pool.allocate(3)
    assert pages is not None
    for page, name in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.register(page, name)
    pool.release(pages)
    assert pool.allocate(1) == pages[2:]
    assert [pool.find(name) for name in (b"a", b"b", b"c")] == [*pages[:2], None]


def test_a_text_that_goes_on_shares_only_what_was_final():
    """The last block's keys are those of the masks it had: nobody computed them again when its tokens were known."""
    for seed in range(3):
        lm, engine = (made := tiny_lm(seed, spread=0.5, **FAMILIES["sdar"])), dlm.Engine(made, page_size=4)
        prompt = ids(seed, 8)
        longer = [*prompt, *engine.generate([prompt], gen_length=8, rule="threshold", threshold=0.0)[0].tokens]
        expected = dlm.generate(lm, [longer], gen_length=8, cache="none")
        assert tokens(engine.generate([longer], gen_length=8)) == tokens(expected)


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_whatever_happens_no_page_is_lost_and_no_token_changes(family):
    lm = tiny_lm(9, spread=0.5, **FAMILIES[family])
    draw = random.Random(0)
    cache = "dual" if family == "llada" else "exact"
    pool = prompts(12)
    settings = [*MIXED, {"gen_length": 8, "block_length": 4, "cfg_scale": 0.4, "rule": "margin"}]
    truth: dict[tuple[int, int], list[int]] = {}
    engine = dlm.Engine(lm, cache=cache, page_size=4, num_pages=18, max_num_tokens=72, max_num_requests=5)
    expected: dict[str, tuple[int, int]] = {}
    finished = ages = 0
    for _ in range(1500):
        deed = draw.random()
        if deed < 0.3 and len(expected) < 9:
            which = draw.randrange(len(pool)), draw.randrange(len(settings))
            name = engine.add_request(pool[which[0]], **settings[which[1]])
            expected[name] = which
        elif deed < 0.34 and expected:
            name = draw.choice(list(expected))
            engine.cancel(name)
            del expected[name]
        else:
            rows = engine.stats().rows
            earliest = min(engine.batch.sequences.values(), key=lambda seq: seq.number, default=None)
            runs = earliest is not None and earliest.parked is None
            events = engine.step()
            assert engine.stats().rows - rows <= 72
            assert not runs or earliest.parked is None
            for event in events:
                if event.result is not None:
                    which = expected.pop(event.request_id)
                    if which not in truth:
                        truth[which] = dlm.generate(lm, [pool[which[0]]], cache=cache, **settings[which[1]])[0].tokens
                    assert event.result.tokens == truth[which]
                    finished += 1
        ages = max([ages, *(seq.waited for seq in engine.batch.scheduler.running)])
        tables = [table for seq in engine.batch.sequences.values() for table in seq.pages.tables]
        users = torch.zeros(18, dtype=torch.long)
        for table in tables:
            users[table] += 1
        assert users.tolist() == engine.batch.pool.users.tolist()
        count = engine.batch.pool.count()
        assert count.used + count.cached + count.blank == 18
    for event in engine.stream():
        finished += event.result is not None
    assert finished > 150 and ages <= 5
    assert engine.stats().preemptions > 0 or cache == "dual"
    assert engine.stats().pages_used == 0 and not engine.has_work


def test_what_can_never_run_is_refused_at_once():
    engine = dlm.Engine(tiny_lm(), page_size=4, num_pages=3, max_num_tokens=64)
    with pytest.raises(UserError, match=r"needs 5 pages of 4 positions \(18 positions\), and the engine has 3"):
        engine.add_request([1, 2], gen_length=16)
    engine = dlm.Engine(tiny_lm(), max_num_tokens=16)
    refused("needs 18 positions in one forward, and max_num_tokens = 16", engine.add_request, [1, 2], gen_length=16)
    engine.add_request([1], gen_length=4, request_id="a")
    refused("'a' is already under way", engine.add_request, [1], gen_length=4, request_id="a")
    refused("no request 'b' is under way; there are: a", engine.cancel, "b")
    refused('cache = "exact" needs causal or block-causal', dlm.Engine, tiny_lm(), cache="exact")
    refused('cache = "dual" is for bidirectional families', dlm.Engine, tiny_lm(**FAMILIES["sdar"]), cache="dual")


def test_poisoned_logits_end_one_request_and_not_the_batch():
    lm = tiny_lm(5)
    with torch.no_grad():
        lm.network.embed.weight[61] = float("nan")
    good = [ids(1, 6), ids(2, 9)]
    expected = tokens(dlm.generate(lm, good, gen_length=8))
    engine = dlm.Engine(lm)
    asked = zip([good[0], [1, 61], good[1]], "abc", strict=True)
    names = [engine.add_request(prompt, gen_length=8, request_id=name) for prompt, name in asked]
    events = list(engine.stream())
    results = {e.request_id: e.result for e in events if e.result is not None}
    errors = {e.request_id: e.error for e in events if e.error is not None}
    assert names == ["a", "b", "c"]
    assert [results["a"].tokens, results["c"].tokens] == expected
    assert list(errors) == ["b"] and "NaN" in errors["b"]
    assert engine.stats().pages_used == 0
    refused("request '0': the network gave NaN", dlm.generate, lm, [[61]], gen_length=4)


def test_streams_tell_committed_text_once_and_in_order():
    lm = text_lm()
    engine = dlm.Engine(lm)
    engine.add_request("hello", gen_length=32, block_length=8, steps=16, request_id="a")
    engine.add_request("what is this", gen_length=16, block_length=8, steps=8, request_id="b")
    told: dict[str, list] = {"a": [], "b": []}
    for event in engine.stream():
        told[event.request_id].append(event)
    for events in told.values():
        result = events[-1].result
        assert result is not None and all(event.result is None for event in events[:-1])
        assert "".join(event.text for event in events) == result.text
        assert [t for event in events for t in event.tokens] == result.tokens
        assert len(events) >= 2


def test_multi_block_needs_fewer_forwards_when_the_model_is_sure():
    lm = tiny_lm(4, spread=0.7)
    settings = {"gen_length": 32, "block_length": 4, "rule": "threshold", "threshold": 0.5}
    single = dlm.generate(lm, prompts(3), **settings)
    multi = dlm.generate(lm, prompts(3), strategy="multi_block", **settings)
    assert sum(r.nfe for r in multi) < sum(r.nfe for r in single)
    assert all(r.tpf > 1 for r in multi)
    one = dlm.generate(lm, prompts(3), strategy="multi_block", max_active_blocks=1, **settings)
    assert tokens(one) == tokens(single)
    late = dlm.generate(lm, prompts(3), strategy="multi_block", block_add=1.0, **settings)
    assert [(r.tokens, r.nfe) for r in late] == [(r.tokens, r.nfe) for r in single]


def test_the_first_open_block_never_stands_still():
    events: list = []
    settings = {"gen_length": 16, "block_length": 4, "rule": "threshold", "threshold": 1.0, "on_step": events.append}
    dlm.generate(tiny_lm(4, spread=0.5), [[1, 2]], strategy="multi_block", block_add=0.0, **settings)
    masked = set(range(2, 18))
    for event in events:
        done, front = set(event.committed[0].nonzero()[:, 0].tolist()), (min(masked) - 2) // 4
        assert any((position - 2) // 4 == front for position in done)
        masked -= done
    assert not masked


def test_the_async_front_tells_the_same():
    lm = text_lm()

    async def collect() -> list[str]:
        engine = dlm.Engine(lm)
        engine.add_request("hello", gen_length=16, block_length=8, steps=8)
        return [event.text async for event in engine.astream()]

    (whole,) = dlm.generate(lm, ["hello"], gen_length=16, block_length=8, steps=8)
    assert "".join(asyncio.run(collect())) == whole.text


def test_requests_may_come_while_others_run_and_samples_are_numbered():
    lm = tiny_lm(2)
    settings = {"gen_length": 8, "temperature": 1.0, "seed": 4}
    expected = dlm.generate(lm, [[1, 2]], num_samples=2, **settings)
    engine = dlm.Engine(lm)
    engine.add_request([1, 2], request_id="x", **settings)
    engine.step()
    engine.add_request([1, 2], request_id="y", sample=1, **settings)
    results = {event.request_id: event.result for event in engine.stream() if event.result}
    assert [results["x"].tokens, results["y"].tokens] == tokens(expected)
    engine.add_request([*ids(1, 3), MASK, MASK], infill=True, request_id="z")
    assert engine.generate([[3]], gen_length=4)[0].request_id == "0"
    assert [event.request_id for event in engine.stream() if event.result] == ["z"]
