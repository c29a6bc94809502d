import dataclasses

import numpy as np
import pytest
import tokenizers
import torch

import dlm
from dlm.inference.prompts import Piece, as_prompts, continuation, infilling, parse_holes, runs
from tests.refusals import refused, told

from .tiny import EOS, MASK, byte_tokenizer, likes, text_lm, tiny_lm


def test_holes_are_cut_out():
    assert parse_holes("a [MASK:12] b[MASK]") == [Piece("a "), Piece(hole=12), Piece(" b"), Piece(hole=1)]
    assert parse_holes("[MASK:3][MASK:4]") == [Piece(hole=3), Piece(hole=4)]
    assert parse_holes("[MASK][MASK][MASK]x[MASK]") == [Piece(hole=3), Piece("x"), Piece(hole=1)]
    assert parse_holes("[MASK:2][MASK]") == [Piece(hole=2), Piece(hole=1)]
    assert parse_holes("plain [text]") == [Piece("plain [text]")]
    assert parse_holes("") == []


def test_an_escaped_hole_is_text():
    assert parse_holes(r"a \[MASK:3] b") == [Piece("a "), Piece("[MASK:3]", plain=True), Piece(" b")]
    assert parse_holes(r"\[MASK][MASK]") == [Piece("[MASK]", plain=True), Piece(hole=1)]


@pytest.mark.parametrize(
    "spelt",
    ["0", "-1", "x", "1.5", "999999999", "²", "16-4", "0-3", "1-100000", "4-", "-4", "4-x", "1-2-3", "4--6", "²-4"],
)
def test_a_hole_of_no_possible_length_is_refused(spelt):
    says = "a hole's length must be a number from 1 to 65536, as in [MASK:12], or two of them between which it is "
    says += "chosen, the smaller one first, as in [MASK:4-16]"
    told(f"prompt 1: [MASK:{spelt}]: {says}", dlm.infill, text_lm(), ["a", f"a [MASK:{spelt}] b"])


def test_runs():
    assert list(runs([9, 9, 1, 9, 2], 9)) == [range(2), range(3, 4)]
    assert list(runs([1, 9], 9)) == [range(1, 2)]
    assert list(runs([], 9)) == []


def test_prompts_come_in_many_forms():
    assert as_prompts("ab") == ["ab"]
    assert as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts(torch.tensor([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert as_prompts(torch.tensor([1, 2])) == [[1, 2]]
    assert as_prompts(["a", np.array([1, 2]), (3, np.int32(4))]) == ["a", [1, 2], [3, 4]]
    assert as_prompts([[]]) == [[]]
    assert as_prompts([]) == []


@pytest.mark.parametrize("prompts", [3, None, [1.5], [["a"]], [[True]], [None], {"a": 1}])
def test_what_is_no_prompt_is_said(prompts):
    refused("must be", dlm.generate, tiny_lm(), prompts)


def test_filled_text_keeps_what_was_given():
    lm = text_lm(seed=2)
    prompt = "def area(r):\n    return [MASK:4] * r ** [MASK:1]\n"
    result = dlm.infill(lm, prompt)[0]
    assert len(result.tokens) == 5
    assert result.holes == [lm.decode(result.tokens[:4]), lm.decode(result.tokens[4:])]
    first, second = result.holes
    assert result.text == f"def area(r):\n    return {first} * r ** {second}\n"
    assert (result.finish_reason, result.nfe, result.tpf) == ("length", 5, 1.0)


def test_text_and_ids_are_filled_alike():
    lm = text_lm(seed=2)
    by_text = dlm.infill(lm, "ab[MASK:3]cd[MASK]", steps=2)[0]
    ids = [*lm.encode("ab"), *[MASK] * 3, *lm.encode("cd"), MASK]
    by_ids = dlm.infill(lm, [ids], steps=2)[0]
    assert (by_text.tokens, by_text.holes, by_text.nfe) == (by_ids.tokens, by_ids.holes, 2)
    filled = iter(by_ids.tokens)
    assert by_ids.text == lm.decode([next(filled) if token == MASK else token for token in ids])


def test_masks_may_be_spelt_as_the_tokenizer_spells_them():
    lm = text_lm(seed=2)
    lm.tokenizer = byte_tokenizer(mask="<|mask|>")
    ids = [*lm.encode("ab"), MASK, MASK, *lm.encode("c"), MASK]
    spelt, mixed = dlm.infill(lm, ["ab<|mask|><|mask|>c<|mask|>", "ab<|mask|><|mask|>c[MASK:1]"])
    assert spelt == dataclasses.replace(dlm.infill(lm, [ids])[0], request_id="0")
    assert (mixed.tokens, mixed.holes, mixed.text) == (spelt.tokens, spelt.holes, spelt.text)


def test_neighbouring_holes_stay_two():
    lm = text_lm(seed=2)
    result = dlm.infill(lm, "a[MASK:3][MASK:2]b")[0]
    assert result.holes == [lm.decode(result.tokens[:3]), lm.decode(result.tokens[3:])]


def test_an_escaped_hole_is_left_in_the_text():
    lm = text_lm(seed=2)
    result = dlm.infill(lm, r"write \[MASK:3]: [MASK:2]")[0]
    assert result.text == f"write [MASK:3]: {result.holes[0]}"
    literal = lm.tokenizer.encode("[MASK]", special=False)
    assert MASK not in literal
    assert dlm.generate(lm, r"\[MASK]", gen_length=4)[0].tokens == dlm.generate(lm, [literal], gen_length=4)[0].tokens


def test_end_of_text_in_a_hole_ends_nothing():
    lm = likes(text_lm(), EOS, 100.0)
    result = dlm.infill(lm, "a[MASK:3]b")[0]
    assert (result.tokens, result.holes, result.text, result.finish_reason) == ([EOS] * 3, [""], "ab", "length")


def test_holes_see_the_text_on_both_sides():
    results = dlm.infill(tiny_lm(3), [[1, 63, 63, right] for right in range(2, 12)])
    assert len({tuple(result.tokens) for result in results}) > 1


def test_block_length_fills_holes_from_the_left():
    lm = tiny_lm(3)
    result = dlm.infill(lm, [[1, 63, 63, 2, 63, 63, 63]], block_length=2, steps=6)[0]
    assert [step // 2 for step in result.steps] == [0, 0, 1, 1, 2]
    assert result.nfe == 5


BAD = [
    ("[[1, 64]]", "generate", "token id 64 at position 1 lies outside the vocabulary of 64 tokens"),
    ("[[-1]]", "generate", "token id -1"),
    ("[[1, 63]]", "generate", "prompt 0 holds mask tokens: fill them with dlm.infill"),
    ("['a']", "generate", "prompt 0 is text, but model 'tiny' has no tokenizer"),
    ("[[1], [1, 2]]", "infill", "prompt 0 has no hole to fill: mark one with its mask id, 63"),
    ("[[1, 63, 99]]", "infill", "token id 99 at position 2"),
    ("['a [MASK:2]']", "infill", "no tokenizer"),
]


@pytest.mark.parametrize(("prompts", "call", "says"), BAD)
def test_bad_prompts_are_named(prompts, call, says):
    told(says, getattr(dlm, call), tiny_lm(), eval(prompts))


def test_holes_in_text_are_for_infill_and_texts_without_for_generate():
    lm = text_lm()
    refused(r"prompt 1 holds mask tokens: fill them with dlm\.infill", dlm.generate, lm, ["a", "b [MASK:3]"])
    refused(r"prompt 0 has no hole to fill: mark one with \[MASK:12\]", dlm.infill, lm, "abc")
    refused("a hole ends where its length says, which stands in the prompt", dlm.infill, lm, "a[MASK:2]", gen_length=4)


def test_shifted_families_need_something_to_start_from():
    lm = tiny_lm(shifted_logits=True)
    refused("prompt 0 is empty", dlm.generate, lm, [[]])
    refused("begins with a hole", dlm.infill, lm, [[63, 1]])
    assert len(dlm.generate(tiny_lm(), [[]], gen_length=4)[0].tokens) == 4


def test_a_causal_model_fills_no_holes():
    lm = tiny_lm(model_type="llama", attention="causal", shifted_logits=True, mask_token_id=None, mask_in_softmax=False)
    refused("has no mask token", dlm.infill, lm, [[1, 2]])


@pytest.mark.parametrize("prompt", ["ab\ud800c", "ab\udcff"])
def test_half_a_character_is_told_with_its_place(prompt):
    lm = text_lm()
    half = ascii(prompt[2])[1:-1].replace("\\", r"\\")
    for run in (dlm.generate, dlm.infill):
        with pytest.raises(
            dlm.UserError, match=rf"prompt 1 is no Unicode text: character 2 is {half}, half of a surrogate"
        ):
            run(lm, ["a [MASK:1]", prompt])
    refused("prompt 0 is no Unicode text", dlm.Engine(lm).add_request, prompt, gen_length=4)
    refused("is no Unicode text: character 2", lm.encode, prompt)


HI = [{"role": "user", "content": "hi"}]
LONG = [{"role": "system", "content": "be brief"}, *HI, {"role": "assistant", "content": "ho"}]
LONG += [{"role": "user", "content": "and?"}]


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


def beginning(lm):
    """A tokenizer that puts end-of-text before texts, in the place of the model's own; the tokenizers library's one."""
    backend = lm.require_tokenizer().backend
    end = [("<|endoftext|>", EOS)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=end)
    return backend


def test_a_text_that_is_filled_in_begins_as_the_tokenizer_has_texts_begin():
    lm = text_lm(shifted_logits=True)
    begun = beginning(lm).encode("ab").ids
    hole = [lm.mask_id] * 2
    for text in ("ab[MASK:2]c[MASK:2]", "<|endoftext|>ab[MASK:2]c[MASK:2]"):
        request = infilling(lm, text, "prompt 0", request_id="0")
        assert list(request.ids) == [*begun, *hole, *lm.encode("c"), *hole]
        assert [request.ids[at] for hole in request.holes for at in hole] == hole * 2
    [one], [other] = dlm.infill(lm, ["ab[MASK:2]c"]), dlm.infill(lm, [[*begun, *hole, *lm.encode("c")]])
    assert one.tokens == other.tokens and one.text.startswith("ab") and one.text.endswith("c")
    assert infilling(lm, "[MASK:2]c", "prompt 0", request_id="0").holes == (range(1, 3),)  # nothing stands before it
    assert infilling(lm, [1, *hole], "prompt 0", request_id="0").holes == (range(1, 3),)  # token ids stay as they are


def test_a_text_that_is_continued_begins_as_the_tokenizer_has_texts_begin():
    lm = text_lm(attention="causal")
    backend = beginning(lm)
    begun = [EOS, *lm.encode("abc")]
    for text in ("abc", "<|endoftext|>abc"):
        assert list(continuation(lm, text, 4, "prompt 0", request_id="0").ids) == begun == backend.encode("abc").ids
    assert list(continuation(lm, [1, 2], 4, "prompt 0", request_id="0").ids) == [1, 2]  # token ids stay as they are
    assert dlm.generate(lm, ["abc"], gen_length=8)[0].tokens == dlm.generate(lm, [begun], gen_length=8)[0].tokens
