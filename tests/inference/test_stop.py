from dataclasses import replace

import numpy as np
import pytest

import dlm
from dlm.inference.texts import TextStream
from tests.refusals import refused, told

from .requests import FAMILIES
from .tiny import EOS, byte_tokenizer, likes, text_lm, tiny_lm

SETTINGS: dict[str, tuple[dict, dict]] = {
    "one block": ({}, {"gen_length": 24, "block_length": 24, "steps": 8}),
    "blocks": ({}, {"gen_length": 24, "block_length": 8, "temperature": 1.0, "seed": 4}),
    "edited": ({}, {"gen_length": 24, "block_length": 8, "steps": 12, "edit_threshold": 0.3, "temperature": 1.0}),
    "multi": ({}, {"gen_length": 24, "block_length": 4, "strategy": "multi_block", "rule": "threshold"}),
    "dual": ({}, {"gen_length": 24, "block_length": 8, "cache": "dual", "rule": "random"}),
    "open": ({}, {"gen_length": "auto", "max_gen_length": 24, "block_length": 8, "steps": 8}),
    "exact": (FAMILIES["sdar"], {"gen_length": 24, "temperature": 1.0, "rule": "threshold", "threshold": 0.4}),
    "causal": (FAMILIES["llama"], {"gen_length": 24, "temperature": 1.0}),
}
PROMPTS = ["ab", "hello", "x = 1\n", "the end of"]


def letters(**fields):
    """A model that writes small letters only."""
    mask = {"mask_token_id": None} if fields.get("attention") == "causal" else {}
    lm = text_lm(**{k: v for k, v in fields.items() if k != "mask_token_id"}, seed=3, spread=0.5)
    lm.network.config.__dict__.update(mask)
    wanted = {lm.encode(chr(code))[0] for code in range(97, 123)}

    def keep(module, inputs, logits):
        logits = logits.clone()
        logits[..., [i for i in range(258) if i not in wanted]] -= 100.0
        return logits

    lm.network.lm_head.register_forward_hook(keep)
    return lm


@pytest.mark.parametrize("name", SETTINGS)
def test_a_text_ends_where_a_stop_string_would_begin(name):
    fields, settings = SETTINGS[name]
    lm = letters(**fields)
    whole = dlm.generate(lm, PROMPTS, **settings)
    stop = [whole[0].text[9:11], whole[1].text[3:6], "never"]
    results = dlm.generate(lm, PROMPTS, stop=stop, batch_size=3, **settings)
    assert {result.finish_reason for result in results[:2]} == {"stop"}
    for before, after, prompt in zip(whole, results, PROMPTS, strict=True):
        ends = [before.text.find(s) + len(s) for s in stop if s in before.text]
        size = min(ends, default=len(before.text))  # here a token is a character
        cut = before.text[:size]
        assert after.tokens == before.tokens[:size] and after.steps == before.steps[:size]
        assert after.text == cut[: min((cut.find(s) for s in stop if s in cut), default=size)]
        assert after.finish_reason == ("stop" if ends else "length") and after.nfe <= before.nfe
        assert dlm.generate(lm, prompt, stop=stop, **settings)[0] == replace(after, request_id="0")


def test_it_ends_at_once_and_no_page_stays():
    lm = letters(**FAMILIES["llama"])
    text = dlm.generate(lm, "ab", gen_length=40)[0].text
    engine = dlm.Engine(lm, page_size=4)
    engine.add_request("ab", gen_length=40, stop=text[:3])
    (last,) = [event.result for event in engine.stream() if event.result]
    assert (last.text, last.nfe, len(last.tokens)) == ("", 3, 3)
    assert engine.stats().pages_used == 0 and engine.stats().tokens == 3


def test_what_runs_beside_it_and_pages_that_run_out_change_nothing():
    fields, settings = SETTINGS["exact"]
    lm = letters(**fields)
    stop = [dlm.generate(lm, PROMPTS[0], **settings)[0].text[6:8], "ee", "st"]
    alone = [dlm.generate(lm, prompt, stop=stop, **settings)[0] for prompt in PROMPTS]
    engine = dlm.Engine(lm, page_size=4, num_pages=12, max_num_tokens=40)
    together = engine.generate(PROMPTS, stop=stop, **settings)
    assert [(r.tokens, r.text, r.nfe) for r in together] == [(r.tokens, r.text, r.nfe) for r in alone]
    assert engine.stats().preemptions and engine.stats().pages_used == 0


@pytest.mark.parametrize("name", ["blocks", "causal", "multi", "edited"])
def test_a_stream_never_shows_a_part_of_what_is_cut(name):
    fields, settings = SETTINGS[name]
    lm = letters(**fields)
    whole = dlm.generate(lm, "hello", **settings)[0].text
    for start in range(1, 20, 3):
        stop = [whole[start : start + 4], whole[start] + "?"]
        engine, shown = dlm.Engine(lm, cache=settings.get("cache", "auto")), []
        engine.add_request("hello", stop=stop, **{k: v for k, v in settings.items() if k != "cache"})
        for event in engine.stream():
            shown.append(event)
            assert whole.startswith("".join(e.text for e in shown))
        result = shown[-1].result
        assert "".join(e.text for e in shown) == result.text == whole[: whole.find(stop[0])]
        assert [t for e in shown for t in e.tokens] == result.tokens


def test_what_only_looked_like_a_stop_string_is_shown_after_all():
    lm = text_lm()
    stream = TextStream(lm, ["abd", "c!"])
    assert [stream.add(lm.encode(c)) for c in "xabcabé"] == ["x", "", "", "ab", "c", "", "abé"]
    assert not stream.completes(lm.encode("ab")) and stream.completes(lm.encode("abd, and so on"))
    assert [stream.add(lm.encode("a")), stream.add(lm.encode("b"), last=True)] == ["", "ab"]


def test_a_cut_may_go_through_a_token():
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens(["so it ends"])
    lm = tiny_lm(tokenizer=type(tokenizer)(tokenizer.backend), vocab_size=259, mask_token_id=256, eos_token_id=EOS)
    result = dlm.generate(likes(lm, 258, 60.0), "a", gen_length=8, block_length=4, stop="ends")[0]
    assert (result.text, result.tokens, result.finish_reason) == ("so it ", [258], "stop")


def test_the_name_of_a_special_token_stops_too():
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(["<|turn|>"])
    lm = tiny_lm(tokenizer=type(tokenizer)(tokenizer.backend), vocab_size=259, mask_token_id=256, eos_token_id=EOS)
    lm = likes(lm, 258, 60.0)
    assert dlm.generate(lm, "a", gen_length=8)[0].finish_reason == "length"
    result = dlm.generate(lm, "a", gen_length=8, stop=["<|turn|>", "x"])[0]
    assert (result.text, result.tokens, result.finish_reason) == ("", [258], "stop")


def test_a_trace_with_a_stop_string_runs_again_and_forks(tmp_path):
    fields, settings = SETTINGS["blocks"]
    lm = letters(**fields)
    whole = dlm.generate(lm, "hello", **settings)[0]
    with dlm.TraceStore(tmp_path / "traces.db") as store:
        dlm.generate(lm, "hello", stop=whole.text[12:15], trace=store, request_ids=["a"], **settings)
        trace = store["a"]
        assert trace.context["sampler"]["stop"] == [whole.text[12:15]] and trace.meta["finish_reason"] == "stop"
        assert trace.num_steps < whole.nfe
        assert dlm.replay.verify(lm, trace).identical
        assert np.array_equal(dlm.replay.fork(lm, trace, step=3).states(), trace.states())
        longer = dlm.replay.fork(lm, trace, step=trace.num_steps, stop=())
        assert longer.tokens[5:].tolist() == whole.tokens
        for step in (2, 14):  # what the parent wrote stays, even behind a stop string of the child's
            child = dlm.replay.fork(lm, trace, step=step, stop=whole.text[0])
            assert np.array_equal(child.states()[: step + 1], trace.states()[: step + 1])
            assert step <= child.num_steps < trace.num_steps
            assert dlm.replay.verify(lm, child).identical


BAD = [
    ({"stop": ""}, 'stop = "": an empty string stands everywhere'),
    ({"stop": ["a", ""]}, "an empty string"),
    ({"stop": 3}, "stop = 3: expected a string or a list"),
    ({"stop": ["a", 3]}, 'stop = ["a", 3]'),
]


@pytest.mark.parametrize(("settings", "says"), BAD, ids=str)
def test_what_is_no_stop_string_is_said(settings, says):
    told(says, dlm.generate, text_lm(), "a", **settings)
    refused("is text, but model 'tiny' has no tokenizer", dlm.generate, tiny_lm(), [[1]], stop="a")
    refused("ends a continuation, and a hole ends where its length says", dlm.infill, text_lm(), "a[MASK:2]", stop="a")
