"""`dlm.generate`: token for token what the papers' algorithms give, alone or in a crowd."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dlm
from dlm.diffusion.unmask import RULES, Threshold
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.plan import Plan
from dlm.inference.request import Request
from tests.refusals import refused

from . import oracle
from .requests import FAMILIES, MASK, of_rule
from .tiny import EOS, likes, text_lm, tiny_lm

# Not the empty prompt: a canvas of nothing but masks looks the same from every position, an exact tie of all of them.
PROMPTS = [
    [1, 2, 3],
    [5],
    [9, 8, 7, 6, 5, 4, 3, 2, 1],
    [4, 4],
    [10, 20, 30, 40],
    [62, 0],
    [33] * 7,
    [11, 12, 13, 14, 15, 16],
]


def ids(seed: int, length: int) -> list[int]:
    return torch.randint(0, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


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


@pytest.mark.parametrize("family", ["sdar", "Fast_dLLM_Qwen", "Dream", "llama", "guided", "edited", "infilled"])
def test_so_does_every_family_and_option(family):
    fields: dict = {"model_type": family}
    settings: dict = {"gen_length": 8, "temperature": 1.0, "rule": "threshold", "threshold": 0.4}
    prompts = PROMPTS
    call = dlm.generate
    if family in ("sdar", "Fast_dLLM_Qwen"):
        fields |= {"attention": "block_causal", "block_length": 4, "shifted_logits": family != "sdar"}
    elif family == "Dream":
        fields |= {"shifted_logits": True}
    elif family == "llama":
        fields |= {"attention": "causal", "shifted_logits": True, "mask_token_id": None, "mask_in_softmax": False}
    else:
        fields = {"mask_in_softmax": False}
        settings |= {
            "guided": {"cfg_scale": 0.5},
            "edited": {"edit_threshold": 0.3, "remask_threshold": 0.1, "max_post_edit_steps": 3},
        }.get(family, {})
        if family == "infilled":
            call, prompts = dlm.infill, [[*prompt, 63, 63, *prompt[:i], 63, 63, 63] for i, prompt in enumerate(prompts)]
            del settings["gen_length"]
    lm = tiny_lm(5, **fields)
    together = call(lm, prompts, batch_size=5, **settings)
    for prompt, result in zip(prompts, together, strict=True):
        alone = call(lm, [prompt], **settings)[0]
        assert (alone.tokens, alone.nfe, alone.steps) == (result.tokens, result.nfe, result.steps)


@pytest.mark.parametrize("prompt_length", [1, 4, 7])
@pytest.mark.parametrize("threshold", [0.3, 0.9])
def test_block_causal_families_decode_aligned_blocks(prompt_length, threshold):
    lm = tiny_lm(2, model_type="sdar", attention="block_causal", block_length=4)
    prompt = ids(1, prompt_length)
    expected = oracle.block_diffusion(lm, prompt, 12, 4, threshold)
    result = dlm.generate(lm, [prompt], gen_length=12, rule="threshold", threshold=threshold)[0]
    assert result.tokens == expected


def test_causal_families_go_left_to_right():
    lm = tiny_lm(
        4, model_type="llama", attention="causal", shifted_logits=True, mask_token_id=None, mask_in_softmax=False
    )
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
    sizes = []
    ended = dlm.generate(
        tiny_lm(3, eos_token_id=often),
        PROMPTS,
        gen_length=32,
        block_length=8,
        on_step=lambda e: sizes.append(len(e.canvas)),
    )
    assert sizes[0] == 8
    assert sizes[-1] < 8
    for before, after in zip(full, ended, strict=True):
        cut = before.tokens.index(often) + 1 if often in before.tokens else 32
        assert after.tokens == before.tokens[:cut]
        assert after.finish_reason == ("stop" if often in before.tokens else "length")


def test_open_ended_generation_adds_blocks():
    lm = tiny_lm(6)
    result = dlm.generate(lm, [[1, 2]], gen_length="auto", max_gen_length=20, block_length=8, steps=4)[0]
    assert (len(result.tokens), result.finish_reason, result.nfe) == (20, "length", 12)
    eos = result.tokens[9]
    stopped = dlm.generate(
        tiny_lm(6, eos_token_id=eos), [[1, 2]], gen_length="auto", max_gen_length=20, block_length=8, steps=4
    )[0]
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


def test_rules_by_name_by_value_and_by_lladas_name():
    lm = tiny_lm()
    tokens = dlm.generate(lm, [[1]], gen_length=16, rule="threshold", threshold=0.3)[0].tokens
    assert dlm.generate(lm, [[1]], gen_length=16, rule=Threshold(threshold=0.3))[0].tokens == tokens
    by_rule = dlm.generate(lm, [[1]], gen_length=16, rule="random")[0].tokens
    assert dlm.generate(lm, [[1]], gen_length=16, remasking="random")[0].tokens == by_rule


def test_training_mode_and_gradients_are_left_as_they_were():
    lm = tiny_lm()
    lm.network.train()
    dlm.generate(lm, [[1]], gen_length=4)
    assert lm.network.training
    assert torch.is_grad_enabled()


def test_no_prompts_no_results():
    assert dlm.generate(tiny_lm(), []) == []


ALONE = {"memory_fraction", "max_waiting"}


def test_the_signature_and_the_help_are_made_of_the_settings():
    fields = SamplerConfig.model_fields | EngineConfig.model_fields
    own = {"lm", "prompts", "trace", "request_ids", "batch_size", "on_step"}
    for function, without in ((dlm.generate, ALONE), (dlm.infill, {*ALONE, "gen_length", "max_gen_length", "stop"})):
        signature = inspect.signature(function).parameters
        assert signature.keys() == own | fields.keys() - without
        assert all(p.kind is p.KEYWORD_ONLY for name, p in signature.items() if name not in ("lm", "prompts"))
        for name in signature.keys() & fields.keys():
            assert signature[name].default == fields[name].default
            assert f"\n    {name}: {fields[name].description}" in function.__doc__
        assert all(f" {name}," in function.__doc__ or f" {name}." in function.__doc__ for name in RULES)
        assert "One of: auto, none, prefix, dual, exact." in function.__doc__
    engine = inspect.signature(dlm.Engine).parameters
    assert engine.keys() == {"lm", "trace", "on_step", *EngineConfig.model_fields}


ADDED = """
from dataclasses import dataclass
from typing import Annotated
from pydantic import Field
from dlm.diffusion.unmask import RULES, Threshold

@dataclass(frozen=True, kw_only=True)
class Sure(Threshold):
    doubt: Annotated[float, Field(ge=0, le=1, description="what a threshold lacks to 1")] = 0.25

    def __call__(self, score, masked, quota):
        return Threshold(threshold=1 - self.doubt)(score, masked, quota)

RULES["sure"] = Sure

import dlm
from tests.inference.tiny import tiny_lm
lm = tiny_lm(1, spread=0.6)
plain = dlm.generate(lm, [[1]], gen_length=16, rule="threshold", threshold=0.5)[0].steps
assert dlm.generate(lm, [[1]], gen_length=16, rule="sure", doubt=0.5)[0].steps == plain
assert dlm.generate(lm, [[1]], gen_length=16, rule=Sure(doubt=0.5))[0].steps == plain != list(range(16))
assert "doubt: Rule sure: what a threshold lacks to 1." in dlm.generate.__doc__
for wrong in ({"rule": "sure", "doubt": 2}, {"doubt": 0.5}):
    try:
        dlm.generate(lm, [[1]], **wrong)
        raise SystemExit(f"{wrong} was taken")
    except dlm.UserError as error:
        print(error)
from dlm.cli.infer import main
main(["--help"])
"""


def test_a_rule_from_outside_is_one_class_and_one_line():
    done = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert not done.returncode, done.stderr
    wide, unread, *page = done.stdout.splitlines()
    assert wide == "generate(): doubt = 2: must be less than or equal to 1"
    assert unread.startswith('generate(): doubt = 0.5 is only read by the rule sure, and rule = "low_confidence": ')
    at = page.index("  --sampler.doubt  a number = 0.25")
    assert page[at + 1].strip() == "Rule sure: what a threshold lacks to 1."


ALWAYS = {
    "gen_length": 32,
    "block_length": 8,
    "steps": 8,
    "temperature": 0.0,
    "cfg_scale": 0.0,
    "top_k": None,
    "seed": 3,
}


def test_what_always_counts_may_always_be_given():
    for fields in FAMILIES.values():
        lm = tiny_lm(**fields)
        for rule in ("low_confidence", "threshold", "entropy_bound"):
            assert dlm.generate(lm, [[1, 2]], rule=rule, num_samples=1, **ALWAYS)
    samples = dlm.generate(tiny_lm(), [[1]], gen_length=8, rule="random", num_samples=3)
    assert len({tuple(result.steps) for result in samples}) == 3


BAD = [
    ({"rule": "margins"}, ['rule = "margins"', 'did you mean "margin"?']),
    ({"treshold": 0.5}, ['unknown key "treshold"', 'did you mean "threshold"?']),
    ({"threshold": 1.5}, ["threshold = 1.5"]),
    ({"temperature": -1.0}, ["temperature = -1.0"]),
    ({"top_p": 0.0}, ["top_p = 0.0"]),
    ({"steps": 0}, ["steps = 0"]),
    ({"block_length": 0}, ["block_length = 0"]),
    ({"gen_length": 0}, ["gen_length = 0"]),
    ({"gen_length": "long"}, ["gen_length", "long"]),
    ({"gen_length": 40, "block_length": 16}, ["gen_length = 40", "block_length = 16", "make it 48"]),
    ({"gen_length": 32, "block_length": 8, "steps": 6}, ["steps = 6", "4 blocks", "gen_length = 32", "make it 8"]),
    ({"gen_length": 32, "block_length": 8, "steps": 3}, ["steps = 3", "4 blocks"]),
    ({"rule": "margin", "remasking": "random"}, ["margin", "random", "disagree"]),
    ({"request_ids": ["a", "b"]}, ["2 request_ids for 1 prompts"]),
    ({"batch_size": 0}, ["batch_size = 0"]),
    # read by nothing that was chosen
    (
        {"threshold": 0.01},
        ["threshold = 0.01 is only read by the rules threshold, hierarchical, credit", '"low_confidence"'],
    ),
    (
        {"threshold": 0.9, "rule": "margin"},
        ["threshold = 0.9 is only read by", 'rule = "margin"', "leave threshold out"],
    ),
    ({"factor": 9}, ["factor = 9 is only read by the rule factor,"]),
    ({"tau_low": 0.4, "rule": "threshold"}, ["tau_low = 0.4 is only read by the rule hierarchical"]),
    ({"gamma": 0.4}, ["gamma = 0.4 is only read by the rule entropy_bound"]),
    ({"entropy_threshold": 0.4}, ["entropy_threshold = 0.4 is only read by the rule entropy_threshold"]),
    (
        {"threshold": 0.3, "rule": Threshold(threshold=0.4)},
        ["threshold = 0.3 stands beside rule = Threshold(threshold=0.4)"],
    ),
    ({"num_samples": 3}, ["num_samples = 3 is only read with a temperature above 0", "temperature = 0"]),
    ({"top_k": 5}, ["top_k = 5 is only read with a temperature above 0"]),
    ({"top_p": 0.5}, ["top_p = 0.5 is only read with a temperature above 0"]),
    ({"max_gen_length": 64}, ['max_gen_length = 64 is only read with gen_length = "auto", and gen_length = 128']),
    ({"max_active_blocks": 2}, ['max_active_blocks = 2 is only read by strategy = "multi_block"']),
    ({"block_add": 0.5}, ['block_add = 0.5 is only read by strategy = "multi_block"']),
    (
        {"max_post_edit_steps": 2},
        ["max_post_edit_steps = 2 is only read with edit_threshold, and edit_threshold is not set"],
    ),
    ({"refresh_interval": 2}, ['refresh_interval = 2 is only read by cache = "prefix" and "dual", and cache = "none"']),
    ({"cache_delay": 2, "cache": "dual"}, ["cache_delay = 2", "with refresh_interval"]),
    ({"memory_fraction": 0.5}, ["memory_fraction = 0.5 is only read by a dlm.Engine"]),
    ({"memory_fraction": 0.5, "num_pages": 9}, ["memory_fraction = 0.5 is only read without num_pages"]),
    # what others call it
    ({"max_new_tokens": 8}, ['unknown key "max_new_tokens"; here it is "gen_length"']),
    ({"max_length": 8}, ['here it is "gen_length", without the prompt']),
    ({"alg": "entropy"}, ['unknown key "alg"; here it is "rule"']),
    ({"alg_temp": 0.1}, ['unknown key "alg_temp"', 'see "rule"']),
    ({"do_sample": True}, ['unknown key "do_sample"; here it is "temperature"']),
    ({"n": 2}, ['unknown key "n"; here it is "num_samples"']),
    ({"strategy": "multi-block"}, ["strategy = 'multi-block'", 'did you mean "multi_block"?']),
    ({"cach": "dual"}, ['unknown key "cach"; did you mean "cache"?']),
]


def test_values_by_position_are_asked_for_by_name():
    for call, prompt in ((dlm.generate, [[1]]), (dlm.infill, [[1, MASK]])):
        refused(r"\(\) takes lm and prompts by position and everything else by name", call, tiny_lm(), prompt, 32, 8)
    refused("write gen_length=32 or steps=32", dlm.generate, tiny_lm(), [[1]], 32)
    refused(r"^Engine\(\) takes lm by position .*: write cache='dual'", dlm.Engine, tiny_lm(), "dual")


def test_settings_of_the_engine_are_not_those_of_a_request():
    engine = dlm.Engine(tiny_lm(), cache="dual", refresh_interval=4, cache_delay=2)
    with pytest.raises(dlm.UserError, match=r"add_request\(\): unknown key \"cache\"; it is a setting of the engine"):
        engine.add_request([1], cache="dual")
    with pytest.raises(dlm.UserError, match='refresh_interval = 4 is only read by cache = "prefix" and "dual"'):
        dlm.Engine(tiny_lm(), refresh_interval=4)
    assert engine.config.with_cache("none") == EngineConfig(cache="none")


@pytest.mark.parametrize(("settings", "says"), BAD, ids=str)
def test_what_cannot_be_done_is_said(settings, says):
    with pytest.raises(dlm.UserError) as caught:
        dlm.generate(tiny_lm(), [[1]], **settings)
    for words in says:
        assert words in str(caught.value)


def test_broken_weights_are_said():
    lm = tiny_lm()
    with torch.no_grad():
        lm.network.norm.weight[0] = float("nan")
    refused("NaN", dlm.generate, lm, [[1]], gen_length=4)


def test_a_causal_model_cannot_be_guided():
    lm = tiny_lm(
        4, model_type="llama", attention="causal", shifted_logits=True, mask_token_id=None, mask_in_softmax=False
    )
    refused("no mask token", dlm.generate, lm, [[1]], gen_length=4, cfg_scale=1.0)
