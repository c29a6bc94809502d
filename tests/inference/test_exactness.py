"""What the engine decodes: exact where it says so, the papers' approximations where asked, the same tokens in any company."""

from dataclasses import replace

import pytest
import torch

import dlm
from dlm.inference.config import SamplerConfig
from dlm.inference.decoding import continuations, infillings
from dlm.kernels import reference as reference_kernels
from dlm.kernels.c import binding
from dlm.kernels.paths import PATHS
from tests.refusals import refused

from . import oracle
from .requests import CACHED, FAMILIES, MASK, RULE, drive, holes, ids, logits, of_rule, prompts, reference, tokens
from .tiny import tiny_lm

KINDS = {"plain": {}, "warm": {"temperature": 1.0, "seed": 3, **RULE}, "guided": {"cfg_scale": 0.6, **RULE}}
KINDS["edited"] = {"edit_threshold": 0.3, "remask_threshold": 0.1, "max_post_edit_steps": 3, **RULE}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_uncached_is_the_reference_sampler_and_exact_is_uncached(family, kind):
    settings = KINDS[kind]
    if family == "llama" and settings.keys() & {"cfg_scale", "edit_threshold"}:
        pytest.skip("no mask")
    lm = tiny_lm(2, **FAMILIES[family])
    decodings = continuations(lm, prompts(5), SamplerConfig(gen_length=12, block_length=4, **settings), where="")
    expected = reference(lm, decodings)
    assert tokens(drive(lm, decodings, cache="none")) == expected
    if family in CACHED:
        for page_size in (1, 3, 4, 32):
            assert tokens(drive(lm, decodings, cache="exact", page_size=page_size)) == expected


@pytest.mark.parametrize("family", ["llada", "Dream", "sdar", "Fast_dLLM_Qwen"])
@pytest.mark.parametrize("block_length", [None, 3])
def test_holes_too(family, block_length):
    lm = tiny_lm(6, **FAMILIES[family])
    decodings = infillings(lm, holes(4), SamplerConfig(gen_length="auto", block_length=block_length, steps=6), where="")
    found = zip(reference(lm, decodings), decodings, strict=True)
    expected = [[ids[place] for hole in d.request.holes for place in hole] for ids, d in found]
    assert tokens(drive(lm, decodings, cache="none")) == expected
    if family in CACHED:
        assert tokens(drive(lm, decodings, cache="exact", page_size=4)) == expected


@pytest.mark.parametrize("family", CACHED)
@pytest.mark.parametrize("block_length", [4, 6])
def test_exact_with_several_blocks_open_is_uncached(family, block_length):
    lm = tiny_lm(4, spread=0.5, **FAMILIES[family])
    settings = {"gen_length": 24, "block_length": block_length, "strategy": "multi_block", "max_active_blocks": 3}
    settings |= RULE
    decodings = continuations(lm, prompts(4), SamplerConfig(**settings), where="")
    plain = drive(lm, decodings, cache="none")
    cached = drive(lm, decodings, cache="exact", page_size=5)
    assert tokens(plain) == tokens(cached)
    assert [r.nfe for r in plain] == [r.nfe for r in cached]
    assert [r.steps for r in plain] == [r.steps for r in cached]


@pytest.mark.skipif(binding.unavailable() is not None, reason=str(binding.unavailable()))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("experts", [False, True])
def test_c_and_torch_give_the_same_tokens(family, experts):
    """Of experts C computes attention and confidence alone."""
    moe = {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}} if experts else {}
    lm = tiny_lm(2, **FAMILIES[family], **moe)
    settings = {"gen_length": 12, "block_length": 4, "page_size": 4}
    settings |= {"cache": "dual" if family in ("llada", "Dream") else "exact", **RULE}
    ours = dlm.generate(lm, prompts(5), kernels="c", **settings)
    assert tokens(dlm.generate(lm, prompts(5), kernels="torch", **settings)) == tokens(ours)


@pytest.mark.parametrize(("kernels", "why"), [("triton", "Triton"), ("c", "DLM_NATIVE = 0 switches"), ("blas", "auto")])
def test_kernels_that_cannot_be_had_say_why(kernels, why, monkeypatch):
    monkeypatch.setenv("DLM_NATIVE", "0")
    refused(f"kernels.*{why}", dlm.Engine, tiny_lm(), kernels=kernels)
    for given in ({}, {"kernels": "torch"}):
        assert dlm.Engine(tiny_lm(), **given).batch.stepper.compute.path.name == "torch"


def test_c_is_for_float32_and_bfloat16(monkeypatch):
    lm = tiny_lm()
    lm.network.to(torch.float16)
    refused("C compute in float32 and bfloat16 on a CPU, and the model is float16 on cpu", dlm.Engine, lm, kernels="c")
    assert dlm.Engine(lm).batch.stepper.compute.path.name == "torch"


def blocks_of(positions: list[int], size: int) -> list[list[int]]:
    return [positions[start : start + size] for start in range(0, len(positions), size)]


@pytest.mark.parametrize("threshold", [None, 0.3])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("family", ["llada", "Dream"])
@pytest.mark.parametrize(("gen_length", "block_length", "steps"), [(16, 8, 8), (12, 4, 12), (16, 16, 5)])
def test_prefix_and_dual_are_fast_dllms(family, cache, threshold, gen_length, block_length, steps):
    for seed in range(2):
        lm, prompt = tiny_lm(seed, spread=0.4, **FAMILIES[family]), ids(seed, 3 + 5 * seed)
        canvas = [*prompt, *[MASK] * gen_length]
        blocks = blocks_of(list(range(len(prompt), len(canvas))), block_length)
        canvas, forwards = oracle.fast_dllm(lm, canvas, blocks, steps // len(blocks), cache == "dual", threshold)
        numbers = {"gen_length": gen_length, "block_length": block_length, "steps": steps}
        rule = {} if threshold is None else {"rule": "threshold", "threshold": threshold}
        result = dlm.generate(lm, [prompt], cache=cache, **numbers, **rule)[0]
        assert (result.tokens, result.nfe) == (canvas[len(prompt) :], forwards)


@pytest.mark.parametrize("threshold", [None, 0.3])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("family", ["llada", "Dream"])
@pytest.mark.parametrize("block_length", [None, 3])
def test_holes_with_prefix_and_dual_are_fast_dllms(family, cache, threshold, block_length):
    for seed, prompt in enumerate(holes(4)):
        lm = tiny_lm(seed, spread=0.4, **FAMILIES[family])
        masks = [position for position, token in enumerate(prompt) if token == MASK]
        blocks = blocks_of(masks, block_length or len(masks))
        steps = max(1, 4 // len(blocks))
        canvas, forwards = oracle.fast_dllm(lm, prompt, blocks, steps, cache == "dual", threshold)
        settings = {} if threshold is None else {"rule": "threshold", "threshold": threshold}
        settings |= {} if block_length is None else {"block_length": block_length}
        result = dlm.infill(lm, [prompt], cache=cache, steps=4, **settings)[0]
        assert (result.tokens, result.nfe) == ([canvas[position] for position in masks], forwards)


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


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_finished_block_is_recomputed_for_some_steps(delay):
    engine = dlm.Engine(tiny_lm(), cache="dual", refresh_interval=100, cache_delay=delay)
    engine.generate([ids(0, 8)], gen_length=8, block_length=4, steps=8)
    assert engine.stats().rows == 16 + 3 * 4 + 4 * 4 + delay * 4  # all, the first block, the second, the first again


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
    settings = SamplerConfig(gen_length=16, block_length=4, **RULE)
    work = continuations(lm, prompts(9), settings, where="", request_ids=[str(i) for i in range(9)])
    together = logits(monkeypatch, lm, work, deterministic=True)
    for decoding in work:
        for name, steps in logits(monkeypatch, lm, [decoding], deterministic=True).items():
            assert all(torch.equal(a, b) for a, b in zip(steps, together[name], strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["low_confidence", "margin", "entropy", "threshold", "credit"])
def test_one_pass_over_the_vocabulary_decides_the_same(rule, temperature, monkeypatch):
    lm, read = tiny_lm(5, spread=0.4), []
    settings = {"gen_length": 12, "temperature": temperature, "cfg_scale": 0.3, "kernels": "torch"}
    settings |= of_rule(rule, threshold=0.4)
    plain = dlm.generate(lm, prompts(3), **settings)
    original = reference_kernels.confidence
    monkeypatch.setattr(reference_kernels, "confidence", lambda *a, **b: read.append(1) or original(*a, **b))
    monkeypatch.setitem(PATHS, "torch", replace(PATHS["torch"], confident=True, draws=True))
    assert tokens(dlm.generate(lm, prompts(3), **settings)) == tokens(plain) and read
    with torch.no_grad():
        lm.network.embed.weight[61] = float("nan")
    refused("request '1': the network gave NaN", dlm.generate, lm, [[1], [61]], **settings)
