"""The engine: exact where it says so, the papers' approximations where asked, the same tokens in any company."""

import asyncio
import random

import pytest
import torch

import dlm
from dlm.errors import UserError
from dlm.inference import attend, decide
from dlm.inference import engine as engine_module
from dlm.inference.decoding import continuations, infillings
from dlm.inference.forward import Forward
from dlm.inference.reference import sample

from . import oracle
from .tiny import likes, text_lm, tiny_lm

MASK = 63
FAMILIES: dict[str, dict] = {
    "llada": {},
    "Dream": {"model_type": "Dream", "shifted_logits": True},
    "sdar": {"model_type": "sdar", "attention": "block_causal", "block_length": 4},
    "Fast_dLLM_Qwen": {
        "model_type": "Fast_dLLM_Qwen",
        "attention": "block_causal",
        "block_length": 4,
        "shifted_logits": True,
    },
    "llama": {
        "model_type": "llama",
        "attention": "causal",
        "shifted_logits": True,
        "mask_token_id": None,
        "mask_in_softmax": False,
    },
}
CACHED = ["sdar", "Fast_dLLM_Qwen", "llama"]
RULE = {"rule": "threshold", "threshold": 0.4}


def ids(seed: int, length: int) -> list[int]:
    return torch.randint(0, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts(count: int) -> list[list[int]]:
    return [ids(i, 1 + (7 * i) % 19) for i in range(count)]


def holes(count: int) -> list[list[int]]:
    return [[*ids(i, 2 + i), MASK, MASK, *ids(i + 50, i % 5), *[MASK] * (1 + i), 5] for i in range(count)]


def reference(lm, decodings) -> list[list[int]]:
    first = decodings[0]
    outcomes = sample(lm.network, [d.request for d in decodings], first.plan, first.rule, first.settings, first.stop)
    return [
        list(o.ids[len(d.request.ids) :][: d.request.gen_length]) if d.request.gen_length else list(o.ids)
        for o, d in zip(outcomes, decodings, strict=True)
    ]


def drive(lm, decodings, **engine) -> list[dlm.Generation]:
    return dlm.Engine(lm, **engine).run(decodings)


def tokens(results: list[dlm.Generation]) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0, "seed": 3, **RULE},
        {"cfg_scale": 0.6, **RULE},
        {"edit_threshold": 0.3, "remask_threshold": 0.1, "max_post_edit_steps": 3, **RULE},
    ],
    ids=["plain", "warm", "guided", "edited"],
)
def test_uncached_is_the_reference_sampler_and_exact_is_uncached(family, settings):
    if family == "llama" and settings.keys() & {"cfg_scale", "edit_threshold"}:
        pytest.skip("no mask")
    lm = tiny_lm(2, **FAMILIES[family])
    decodings = continuations(lm, prompts(5), {"gen_length": 12, "block_length": 4, **settings}, where="")
    expected = reference(lm, decodings)
    assert tokens(drive(lm, decodings, cache="none")) == expected
    if family in CACHED:
        for page_size in (1, 3, 4, 32):
            assert tokens(drive(lm, decodings, cache="exact", page_size=page_size)) == expected


@pytest.mark.parametrize("family", ["llada", "Dream", "sdar", "Fast_dLLM_Qwen"])
@pytest.mark.parametrize("block_length", [None, 3])
def test_holes_too(family, block_length):
    lm = tiny_lm(6, **FAMILIES[family])
    decodings = infillings(lm, holes(4), {"block_length": block_length, "steps": 6}, where="")
    expected = [
        [o[p] for h in d.request.holes for p in h] for o, d in zip(reference(lm, decodings), decodings, strict=True)
    ]
    assert tokens(drive(lm, decodings, cache="none")) == expected
    if family in CACHED:
        assert tokens(drive(lm, decodings, cache="exact", page_size=4)) == expected


@pytest.mark.parametrize("family", CACHED)
@pytest.mark.parametrize("block_length", [4, 6])
def test_exact_with_several_blocks_open_is_uncached(family, block_length):
    lm = tiny_lm(4, spread=0.5, **FAMILIES[family])
    settings = {
        "gen_length": 24,
        "block_length": block_length,
        "strategy": "multi_block",
        "max_active_blocks": 3,
        **RULE,
    }
    decodings = continuations(lm, prompts(4), settings, where="")
    plain = drive(lm, decodings, cache="none")
    cached = drive(lm, decodings, cache="exact", page_size=5)
    assert tokens(plain) == tokens(cached)
    assert [r.nfe for r in plain] == [r.nfe for r in cached]
    assert [r.steps for r in plain] == [r.steps for r in cached]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_twins_give_the_same_tokens(family, monkeypatch):
    lm = tiny_lm(2, **FAMILIES[family])
    settings = {
        "gen_length": 12,
        "block_length": 4,
        "cache": "dual" if family in ("llada", "Dream") else "exact",
        **RULE,
    }
    viewed = dlm.generate(lm, prompts(5), page_size=4, **settings)
    monkeypatch.setattr("dlm.inference.forward.paged_attend", attend._kernels)
    assert tokens(dlm.generate(lm, prompts(5), page_size=4, **settings)) == tokens(viewed)


@pytest.mark.parametrize("threshold", [None, 0.3])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("gen_length", "block_length", "steps"), [(16, 8, 8), (12, 4, 12), (16, 16, 5)])
def test_prefix_and_dual_are_fast_dllms(cache, threshold, gen_length, block_length, steps):
    for seed in range(2):
        lm, prompt = tiny_lm(seed, spread=0.4), ids(seed, 3 + 5 * seed)
        expected = oracle.fast_dllm(lm, prompt, gen_length, block_length, steps, cache == "dual", threshold)
        numbers = {"gen_length": gen_length, "block_length": block_length, "steps": steps}
        rule = {} if threshold is None else {"rule": "threshold", "threshold": threshold}
        result = dlm.generate(lm, [prompt], cache=cache, **numbers, **rule)[0]
        assert (result.tokens, result.nfe) == expected


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("family", ["llada", "Dream"])
def test_refreshing_every_step_is_no_cache(cache, family):
    lm = tiny_lm(7, spread=0.4, **FAMILIES[family])
    settings = {"gen_length": 16, "block_length": 8, "cfg_scale": 0.5, **RULE}
    plain = dlm.generate(lm, prompts(3), cache="none", **settings)
    assert tokens(dlm.generate(lm, prompts(3), cache=cache, refresh_interval=1, **settings)) == tokens(plain)
    filled = dlm.infill(lm, holes(3), cache="none")
    assert tokens(dlm.infill(lm, holes(3), cache=cache, refresh_interval=1)) == tokens(filled)


def test_dual_asks_less_of_the_network_than_prefix_and_prefix_less_than_none():
    lm, rows = tiny_lm(), {}
    for cache in ("none", "prefix", "dual"):
        engine = dlm.Engine(lm, cache=cache)
        engine.generate([ids(0, 8)], gen_length=32, block_length=8, steps=32)
        rows[cache] = engine.stats().rows
    full = 4 * 40  # a refresh a block
    assert rows["none"] == 32 * 40
    assert rows["prefix"] == full + 7 * (32 + 24 + 16 + 8)
    assert rows["dual"] == full + 28 * 8


@pytest.mark.parametrize("cache", ["none", "dual", "exact"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alone_in_a_crowd_and_after_preemption(cache, temperature):
    lm = tiny_lm(3, spread=0.4, eos_token_id=7, **FAMILIES["sdar" if cache == "exact" else "llada"])
    settings = {"gen_length": 16, "block_length": 4, "temperature": temperature, "seed": 5, **RULE}
    if cache == "exact":
        settings |= {"strategy": "multi_block"}
    crowd = prompts(16)
    alone = [dlm.Engine(lm, cache=cache, page_size=4).generate([prompt], **settings)[0] for prompt in crowd]
    engine = dlm.Engine(lm, cache=cache, page_size=4, num_pages=14, max_num_tokens=80)
    together = engine.generate(crowd, **settings)
    if cache == "exact":
        assert engine.stats().preemptions > 0
    assert tokens(together) == tokens(alone)
    assert [r.steps for r in together] == [r.steps for r in alone]
    assert engine.stats().pages_used == 0


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_deterministic_logits_are_bit_for_bit_those_of_the_request_alone(family, monkeypatch):
    lm = tiny_lm(**FAMILIES[family], hidden_size=64)
    seen: dict[str, list[torch.Tensor]] = {}

    def listening(network, hidden, wanted, group):
        logits = decide_logits(network, hidden, wanted, group)
        parts = logits.split([int(question.asked.sum()) for question in group])
        for question, part in zip(group, parts, strict=True):
            seen.setdefault(question.sequence.request.request_id, []).append(part.clone())
        return logits

    decide_logits = decide._logits
    monkeypatch.setattr(decide, "_logits", listening)
    names = [str(i) for i in range(9)]
    work = continuations(lm, prompts(9), {"gen_length": 16, "block_length": 4, **RULE}, where="", request_ids=names)
    drive(lm, work, deterministic=True)
    together = dict(seen)
    for name, decoding in zip(names, work, strict=True):
        seen.clear()
        drive(lm, [decoding], deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(seen[name], together[name], strict=True))


def test_a_recorded_forward_gives_the_same_tokens_and_is_recorded_once_a_layout(monkeypatch):
    lm = tiny_lm()
    work = continuations(lm, prompts(5), {"gen_length": 16, "block_length": 8, "steps": 16}, where="")
    plain = tokens(drive(lm, work, cache="dual"))
    recorded = []

    def record(run):  # as a CUDA graph does: the same tensors every time, whatever they hold by then
        result = torch.empty_like(run())
        recorded.append(result.shape)
        return lambda: result.copy_(run()), result

    monkeypatch.setattr(engine_module, "Forward", lambda network, layout, _: Forward(network, layout, record))
    engine = dlm.Engine(lm, cache="dual")
    assert tokens(engine.run(work)) == plain
    assert len(recorded) == 2 and engine.nfe == 16  # one a block


def test_a_prompt_longer_than_a_forward_is_read_in_pieces():
    lm = tiny_lm(1, **FAMILIES["sdar"])
    prompt = ids(4, 57)
    whole = dlm.generate(lm, [prompt], gen_length=8, **RULE)[0]
    engine = dlm.Engine(lm, max_num_tokens=16, page_size=4)
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


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_whatever_happens_no_page_is_lost_and_no_token_changes(family):
    lm = tiny_lm(9, spread=0.5, **FAMILIES[family])
    draw = random.Random(0)
    cache = "dual" if family == "llada" else "exact"
    pool = prompts(12)
    settings = [
        {"gen_length": 8, "block_length": 4, **RULE},
        {"gen_length": 4, "block_length": 4, "temperature": 0.8, "seed": 2},
        {"gen_length": 12, "block_length": 4, "rule": "entropy_threshold", "strategy": "multi_block"},
        {"gen_length": 8, "block_length": 4, "cfg_scale": 0.4, "rule": "margin"},
    ]
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
            for event in engine.step():
                if event.result is not None:
                    which = expected.pop(event.request_id)
                    if which not in truth:
                        truth[which] = dlm.generate(lm, [pool[which[0]]], cache=cache, **settings[which[1]])[0].tokens
                    assert event.result.tokens == truth[which]
                    finished += 1
        ages = max([ages, *(seq.waited for seq in engine.scheduler.running)])
        tables = [table for seq in engine.sequences.values() for table in seq.tables]
        users = torch.zeros(18, dtype=torch.long)
        for table in tables:
            users[table] += 1
        assert users.tolist() == engine.pool.users.tolist()
        count = engine.pool.count()
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
    with pytest.raises(UserError, match="needs 18 positions in one forward, and max_num_tokens = 16"):
        engine.add_request([1, 2], gen_length=16)
    engine.add_request([1], gen_length=4, request_id="a")
    with pytest.raises(UserError, match="'a' is already under way"):
        engine.add_request([1], gen_length=4, request_id="a")
    with pytest.raises(UserError, match="no request 'b' is under way; there are: a"):
        engine.cancel("b")
    with pytest.raises(UserError, match='cache = "exact" needs causal or block-causal'):
        dlm.Engine(tiny_lm(), cache="exact")
    with pytest.raises(UserError, match='cache = "dual" is for bidirectional families'):
        dlm.Engine(tiny_lm(**FAMILIES["sdar"]), cache="dual")


def test_poisoned_logits_end_one_request_and_not_the_batch():
    lm = tiny_lm(5)
    with torch.no_grad():
        lm.network.embed.weight[61] = float("nan")
    good = [ids(1, 6), ids(2, 9)]
    expected = tokens(dlm.generate(lm, good, gen_length=8))
    engine = dlm.Engine(lm)
    names = [
        engine.add_request(p, gen_length=8, request_id=n)
        for p, n in zip([good[0], [1, 61], good[1]], "abc", strict=True)
    ]
    events = list(engine.stream())
    results = {e.request_id: e.result for e in events if e.result is not None}
    errors = {e.request_id: e.error for e in events if e.error is not None}
    assert names == ["a", "b", "c"]
    assert [results["a"].tokens, results["c"].tokens] == expected
    assert list(errors) == ["b"] and "NaN" in errors["b"]
    assert engine.stats().pages_used == 0
    with pytest.raises(UserError, match="request '0': the network gave NaN"):
        dlm.generate(lm, [[61]], gen_length=4)


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


def test_end_of_text_ends_a_request_and_frees_its_pages():
    lm = likes(text_lm(), 257, 50.0)
    engine = dlm.Engine(lm, page_size=4)
    engine.add_request("abc", gen_length=64, block_length=8, steps=64)
    (last,) = [event for event in engine.stream() if event.result is not None]
    assert last.result is not None and last.result.finish_reason == "stop"
    assert last.result.tokens == [257] and last.result.nfe == 8
    assert engine.stats().tokens == 1 and engine.stats().pages_used == 0


def test_multi_block_needs_fewer_forwards_when_the_model_is_sure():
    lm = tiny_lm(4, spread=0.7)
    settings = {"gen_length": 32, "block_length": 4, "rule": "threshold", "threshold": 0.5}
    single = dlm.generate(lm, prompts(3), **settings)
    multi = dlm.generate(lm, prompts(3), strategy="multi_block", **settings)
    assert sum(r.nfe for r in multi) < sum(r.nfe for r in single)
    assert all(r.tpf > 1 for r in multi)
    one = dlm.generate(lm, prompts(3), strategy="multi_block", max_active_blocks=1, **settings)
    assert tokens(one) == tokens(single)


def test_the_async_front_tells_the_same():
    lm = text_lm()

    async def collect() -> list[str]:
        engine = dlm.Engine(lm)
        engine.add_request("hello", gen_length=16, block_length=8, steps=8)
        return [event.text async for event in engine.astream()]

    assert (
        "".join(asyncio.run(collect())) == dlm.generate(lm, ["hello"], gen_length=16, block_length=8, steps=8)[0].text
    )


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["low_confidence", "margin", "entropy", "threshold", "credit"])
def test_the_fused_pass_over_the_vocabulary_decides_the_same(rule, temperature, monkeypatch):
    lm = tiny_lm(5, spread=0.4)
    settings = {"gen_length": 12, "rule": rule, "threshold": 0.4, "temperature": temperature, "cfg_scale": 0.3}
    plain = dlm.generate(lm, prompts(3), **settings)
    monkeypatch.setattr("dlm.inference.decide.on_triton", lambda x: True)  # its twin, that is
    assert tokens(dlm.generate(lm, prompts(3), **settings)) == tokens(plain)
    with torch.no_grad():
        lm.network.embed.weight[61] = float("nan")
    with pytest.raises(UserError, match="request '1': the network gave NaN"):
        dlm.generate(lm, [[1], [61]], **settings)
