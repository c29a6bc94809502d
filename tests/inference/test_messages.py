"""Conversations as prompts of `dlm.generate` and of an engine."""

import pytest

import dlm
from tests.refusals import refused, told

from .tiny import text_lm, tiny_lm

HI = [{"role": "user", "content": "hi"}]
LONG = [
    {"role": "system", "content": "be brief"},
    *HI,
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "and?"},
]


def test_messages_are_rendered_by_the_template():
    lm = text_lm(seed=1)
    expected = [lm.chat(HI), lm.chat(LONG), "plain"]
    assert expected[0] == "User: hi\nAssistant: "
    by_text = dlm.generate(lm, expected, gen_length=6)
    assert dlm.generate(lm, [HI, tuple(LONG), "plain"], gen_length=6) == by_text
    assert dlm.generate(lm, HI, gen_length=6) == by_text[:1]
    engine = dlm.Engine(lm)
    assert engine.generate([LONG, HI], gen_length=6)[0].tokens == by_text[1].tokens
    name = engine.add_request(HI, gen_length=6)
    assert [e.result.tokens for e in engine.stream() if e.result and e.request_id == name] == [by_text[0].tokens]


def test_the_model_s_own_template_is_used():
    lm = text_lm(seed=1)
    lm.tokenizer.settings["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert dlm.generate(lm, HI, gen_length=4) == dlm.generate(lm, "<user>hi", gen_length=4)
    lm = text_lm(seed=1)
    lm.tokenizer.settings["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    refused("prompt 1: the chat template cannot render .* roles must alternate", dlm.generate, lm, ["a", HI])


MALFORMED = [
    ([{"role": "user"}], "prompt 0, message 0 is \"{'role': 'user'}\": a message is"),
    ([*HI, "ho"], "prompt 0, message 1 is 'ho'"),
    (["text", [*HI, {"role": "user", "content": None}]], "prompt 1, message 1 is"),
    ([HI, [{"role": 3, "content": "x"}]], "prompt 1, message 0 is"),
    ([HI, HI[0]], "prompt 0, message 0 is"),
    (HI[0], "prompts must be strings"),
]


@pytest.mark.parametrize(("prompts", "says"), MALFORMED, ids=str)
def test_malformed_messages_are_named(prompts, says):
    told(says, dlm.generate, text_lm(), prompts)


def test_a_model_that_reads_no_text_and_holes_take_no_messages():
    refused("prompt 0 is a conversation, but model 'tiny' has no tokenizer", dlm.generate, tiny_lm(), HI)
    for prompts in (HI, ["a[MASK:2]", HI]):
        refused("was given messages: continue a conversation with dlm.generate", dlm.infill, text_lm(), prompts)
