"""What a request and an engine may be asked for: by which names, with which values, and what is said of others."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dlm
from dlm.diffusion.unmask import RULES, Threshold
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.readers import FILLS
from tests.refusals import refused

from .requests import FAMILIES, MASK
from .tiny import tiny_lm


def test_rules_by_name_by_value_and_by_lladas_name():
    lm = tiny_lm()
    tokens = dlm.generate(lm, [[1]], gen_length=16, rule="threshold", threshold=0.3)[0].tokens
    assert dlm.generate(lm, [[1]], gen_length=16, rule=Threshold(threshold=0.3))[0].tokens == tokens
    by_rule = dlm.generate(lm, [[1]], gen_length=16, rule="random")[0].tokens
    assert dlm.generate(lm, [[1]], gen_length=16, remasking="random")[0].tokens == by_rule


ALONE = {"memory_fraction", "max_waiting"}


def test_the_signature_and_the_help_are_made_of_the_settings():
    fields = SamplerConfig.model_fields | EngineConfig.model_fields
    own = {"lm", "prompts", "trace", "request_ids", "batch_size", "on_step"}
    holes = {*ALONE, "gen_length", "max_gen_length", "stop", "draft_length", "verify"}
    continued = {*ALONE, *FILLS}
    for function, more, without in ((dlm.generate, {"draft"}, continued), (dlm.infill, set(), holes)):
        signature = inspect.signature(function).parameters
        assert signature.keys() == own | more | fields.keys() - without
        assert all(p.kind is p.KEYWORD_ONLY for name, p in signature.items() if name not in ("lm", "prompts"))
        for name in signature.keys() & fields.keys():
            assert signature[name].default == fields[name].default
            assert f"\n    {name}: {fields[name].description}" in function.__doc__
        assert all(f" {name}," in function.__doc__ or f" {name}." in function.__doc__ for name in RULES)
        assert "One of: auto, none, prefix, dual, exact." in function.__doc__
    engine = inspect.signature(dlm.Engine).parameters
    assert engine.keys() == {"lm", "draft", "trace", "on_step", *EngineConfig.model_fields}


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


ALWAYS = {"gen_length": 32, "block_length": 8, "steps": 8, "temperature": 0.0, "cfg_scale": 0.0, "top_k": None}


ALWAYS |= {"seed": 3}


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
    ({"threshold": 0.01}, ["threshold = 0.01 is only read by the rules threshold, hierarchical, credit", '"low_confidence"']),
    ({"threshold": 0.9, "rule": "margin"}, ["threshold = 0.9 is only read by", 'rule = "margin"', "leave threshold out"]),
    ({"factor": 9}, ["factor = 9 is only read by the rule factor,"]),
    ({"tau_low": 0.4, "rule": "threshold"}, ["tau_low = 0.4 is only read by the rule hierarchical"]),
    ({"gamma": 0.4}, ["gamma = 0.4 is only read by the rule entropy_bound"]),
    ({"entropy_threshold": 0.4}, ["entropy_threshold = 0.4 is only read by the rule entropy_threshold"]),
    ({"threshold": 0.3, "rule": Threshold(threshold=0.4)}, ["threshold = 0.3 stands beside rule = Threshold(threshold=0.4)"]),
    ({"num_samples": 3}, ["num_samples = 3 is only read with a temperature above 0", "temperature = 0"]),
    ({"top_k": 5}, ["top_k = 5 is only read with a temperature above 0"]),
    ({"top_p": 0.5}, ["top_p = 0.5 is only read with a temperature above 0"]),
    ({"max_gen_length": 64}, ['max_gen_length = 64 is only read with gen_length = "auto", and gen_length = 128']),
    ({"max_active_blocks": 2}, ['max_active_blocks = 2 is only read by strategy = "multi_block"']),
    ({"block_add": 0.5}, ['block_add = 0.5 is only read by strategy = "multi_block"']),
    ({"max_post_edit_steps": 2}, ["max_post_edit_steps = 2 is only read with edit_threshold, and edit_threshold is not set"]),
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
]  # fmt: skip


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


def test_a_causal_model_cannot_be_guided():
    refused("no mask token", dlm.generate, tiny_lm(4, **FAMILIES["llama"]), [[1]], gen_length=4, cfg_scale=1.0)
