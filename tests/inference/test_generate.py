"""`dlm.generate`: token for token what the papers' algorithms give, alone or in a crowd."""

import pytest
import torch

import dlm
from dlm.diffusion.unmask import RULES
from dlm.inference.plan import Plan
from dlm.inference.request import Request
from tests.refusals import refused

from . import oracle
from .requests import FAMILIES, RULE, ids, of_rule
from .tiny import EOS, likes, text_lm, tiny_lm

# Not the empty prompt: a canvas of nothing but masks looks the same from every position, an exact tie of all of them.
PROMPTS = [[1, 2, 3], [5], [*range(9, 0, -1)], [4, 4], [10, 20, 30, 40], [62, 0], [33] * 7, [*range(11, 17)]]


@pytest.mark.parametrize("cfg_scale", [0.0, 0.7])
@pytest.mark.parametrize(
    ("gen_length", "block_length", "steps"),
    [(16, 16, 16), (16, 16, 5), (16, 4, 8), (24, 8, 21), (32, 8, 8), (12, 6, 24)],
)
def test_is_lladas_algorithm(gen_length, block_length, steps, cfg_scale):
    for seed in range(2):
        lm, prompt = tiny_lm(seed), ids(seed, 3 + 4 * seed)
        expected = oracle.llada(lm, prompt, gen_length, block_length, steps, cfg_scale)
        numbers = {"gen_length": gen_length, "block_length": block_length, "steps": steps, "cfg_scale": cfg_scale}
        result = dlm.generate(lm, [prompt], **numbers)[0]
        assert result.tokens == expected
        forwards = min(steps, gen_length)
        assert result.nfe == forwards * (2 if cfg_scale else 1)
        assert result.tpf == gen_length / result.nfe
        assert result.finish_reason == "length"


@pytest.mark.parametrize("threshold", [0.4, 0.9])
def test_credit_is_dinfers(threshold):
    for seed in range(3):
        lm, prompt = tiny_lm(seed, spread=0.4), ids(seed, 3 + 4 * seed)
        expected = oracle.credit(lm, prompt, 16, 8, threshold)
        settings = {"gen_length": 16, "block_length": 8, "rule": "credit", "threshold": threshold}
        assert dlm.generate(lm, [prompt], **settings)[0].tokens == expected
        assert dlm.generate(lm, [prompt], **{**settings, "rule": "threshold"})[0].tokens != expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_a_prompt_gets_the_same_alone_and_in_a_crowd(rule, temperature):
    lm = tiny_lm(3, eos_token_id=7)
    settings = {"gen_length": 12, "block_length": 6, "steps": 6, "temperature": temperature}
    settings |= {"seed": 11, **of_rule(rule, threshold=0.5, tau_low=0.2, gamma=1.0)}
    together = dlm.generate(lm, PROMPTS, **settings)
    assert [result.request_id for result in together] == [str(i) for i in range(8)]
    for prompt, result in zip(PROMPTS, together, strict=True):
        alone = dlm.generate(lm, [prompt], **settings)[0]
        assert (alone.tokens, alone.nfe, alone.steps) == (result.tokens, result.nfe, result.steps)


CROWDED = {family: (fields, {}) for family, fields in FAMILIES.items()}
CROWDED["guided"] = {"mask_in_softmax": False}, {"cfg_scale": 0.5}
CROWDED["edited"] = CROWDED["guided"][0], {"edit_threshold": 0.3, "remask_threshold": 0.1, "max_post_edit_steps": 3}


@pytest.mark.parametrize("name", CROWDED)
def test_so_does_every_family_and_option(name):
    fields, options = CROWDED[name]
    lm, settings = tiny_lm(5, **fields), {"gen_length": 8, "temperature": 1.0, **RULE, **options}
    together = dlm.generate(lm, PROMPTS, batch_size=5, **settings)
    for prompt, result in zip(PROMPTS, together, strict=True):
        alone = dlm.generate(lm, [prompt], **settings)[0]
        assert (alone.tokens, alone.nfe, alone.steps) == (result.tokens, result.nfe, result.steps)


@pytest.mark.parametrize("prompt_length", [1, 4, 7])
@pytest.mark.parametrize("threshold", [0.3, 0.9])
def test_block_causal_families_decode_aligned_blocks(prompt_length, threshold):
    lm = tiny_lm(2, **FAMILIES["sdar"])
    prompt = ids(1, prompt_length)
    expected = oracle.block_diffusion(lm, prompt, 12, 4, threshold)
    result = dlm.generate(lm, [prompt], gen_length=12, rule="threshold", threshold=threshold)[0]
    assert result.tokens == expected


def test_causal_families_go_left_to_right():
    lm = tiny_lm(4, **FAMILIES["llama"])
    results = dlm.generate(lm, [[1, 2, 3], [9]], gen_length=10)
    assert [r.tokens for r in results] == [oracle.left_to_right(lm, prompt, 10) for prompt in ([1, 2, 3], [9])]
    assert [(r.nfe, r.tpf, r.steps) for r in results] == [(10, 1.0, list(range(10)))] * 2


def test_what_is_generated_does_not_depend_on_the_number_of_samples():
    lm = tiny_lm(1)
    settings = {"gen_length": 8, "temperature": 1.0, "seed": 3}
    four = dlm.generate(lm, [[1], [2]], num_samples=4, request_ids=["a", "b"], **settings)
    assert [r.request_id for r in four] == ["a/0", "a/1", "a/2", "a/3", "b/0", "b/1", "b/2", "b/3"]
    assert [r.sample for r in four] == [0, 1, 2, 3] * 2
    assert len({tuple(r.tokens) for r in four[:4]}) > 1
    two = dlm.generate(lm, [[2], [1]], num_samples=2, **settings)
    assert [r.tokens for r in two] == [four[4].tokens, four[5].tokens, four[0].tokens, four[1].tokens]
    other = dlm.generate(lm, [[1]], **{**settings, "seed": 4})[0]
    assert other.tokens != four[0].tokens


def test_end_of_text_stops_after_its_block_and_nothing_after_it_is_counted():
    lm = likes(text_lm(), EOS, 100.0)
    result = dlm.generate(lm, "ab", gen_length=32, block_length=8, steps=32)[0]
    assert (result.tokens, result.text, result.finish_reason) == ([EOS], "", "stop")
    assert (result.nfe, result.tpf, len(result.steps)) == (8, 1 / 8, 1)
    lm.generation["eos_token_id"] = [5, EOS]
    lm.config.__dict__["eos_token_id"] = None
    assert dlm.generate(lm, "ab", gen_length=32, block_length=8, steps=32)[0].finish_reason == "stop"


def test_rows_that_stop_leave_the_batch():
    lm = tiny_lm(3)
    full = dlm.generate(lm, PROMPTS, gen_length=32, block_length=8)
    often = max({t for r in full for t in r.tokens[:8]}, key=lambda t: sum(t in r.tokens[:8] for r in full))
    sizes, settings = [], {"gen_length": 32, "block_length": 8, "on_step": lambda e: sizes.append(len(e.canvas))}
    ended = dlm.generate(tiny_lm(3, eos_token_id=often), PROMPTS, **settings)
    assert sizes[0] == 8 and sizes[-1] < 8
    for before, after in zip(full, ended, strict=True):
        cut = before.tokens.index(often) + 1 if often in before.tokens else 32
        assert after.tokens == before.tokens[:cut]
        assert after.finish_reason == ("stop" if often in before.tokens else "length")


def test_open_ended_generation_adds_blocks():
    lm = tiny_lm(6)
    settings = {"gen_length": "auto", "max_gen_length": 20, "block_length": 8, "steps": 4}
    result = dlm.generate(lm, [[1, 2]], **settings)[0]
    assert (len(result.tokens), result.finish_reason, result.nfe) == (20, "length", 12)
    eos = result.tokens[9]
    stopped = dlm.generate(tiny_lm(6, eos_token_id=eos), [[1, 2]], **settings)[0]
    assert stopped.tokens == result.tokens[: result.tokens.index(eos) + 1]
    assert stopped.finish_reason == "stop"


def test_a_first_block_does_not_see_masks_that_open_ended_generation_has_not_added():
    lm = tiny_lm(6)
    one = dlm.generate(lm, [[1, 2]], gen_length=8)[0]
    more = dlm.generate(lm, [[1, 2]], gen_length="auto", max_gen_length=24, block_length=8, steps=8)[0]
    assert more.tokens[:8] == one.tokens


def test_defaults_fit_themselves_to_the_request():
    lm = tiny_lm()
    for gen_length in (1, 5, 32):
        assert dlm.generate(lm, [[1]], gen_length=gen_length)[0].nfe == gen_length
    plan = Plan(config=lm.config)
    for gen_length, blocks, steps in ((128, 4, 32), (96, 3, 42), (160, 5, 25), (8192, 256, 1)):
        found = list(plan.blocks(Request(request_id="", ids=(1,), gen_length=gen_length)))
        assert (len(found), found[0].steps) == (blocks, steps)


def test_text_goes_in_and_comes_out():
    lm = text_lm(seed=1)
    result = dlm.generate(lm, "def f(x):", gen_length=8)[0]
    assert result.text == lm.decode(result.tokens)
    assert dlm.generate(lm, [lm.encode("def f(x):")], gen_length=8)[0] == result
    assert set(result.to_dict()) == {"text", "tokens", "nfe", "tpf", "finish_reason", "request_id", "sample", "steps"}


def test_training_mode_and_gradients_are_left_as_they_were():
    lm = tiny_lm()
    lm.network.train()
    dlm.generate(lm, [[1]], gen_length=4)
    assert lm.network.training
    assert torch.is_grad_enabled()


def test_no_prompts_no_results():
    assert dlm.generate(tiny_lm(), []) == []


def test_ids_are_random_unless_given_and_a_taken_one_is_refused_before_work(tmp_path):
    lm, store = text_lm(), dlm.TraceStore(tmp_path / "traces.db")
    first, second = (dlm.generate(lm, ["hello"], gen_length=4, trace=store)[0] for _ in range(2))
    assert first.request_id != second.request_id and first.request_id in store and second.request_id in store
    assert store[first.request_id].text().endswith(first.text) or "�" in first.text
    refused(first.request_id, dlm.generate, lm, ["hello"], gen_length=4, trace=store, request_ids=[first.request_id])
    store.close()
