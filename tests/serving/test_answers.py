"""What a server answers is what `dlm.generate` and `dlm.infill` give, whole or streamed, alone or among many."""

import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dlm
from dlm.serving.ask import plain

from .live import WORDS, config, live, model, soon, streamed

SETTINGS = [
    {"max_tokens": 16},
    {"max_tokens": 7, "block_length": 4, "temperature": 0.9, "seed": 3},
    {"max_tokens": 16, "rule": "threshold", "threshold": 0.3},
    {"max_tokens": 16, "rule": "random", "seed": 11},
    {"max_tokens": 12, "temperature": 1.3, "top_k": 9, "seed": 5, "steps": 6},
    {"max_tokens": 16, "block_length": 4, "strategy": "multi_block", "temperature": 0.8, "seed": 2},
    {"max_tokens": 16, "remask_threshold": 0.2, "temperature": 1.0, "seed": 2},
    {"max_tokens": 24, "temperature": 1.0, "seed": 8, "stop": ["a", "\x01"]},
    {"gen_length": 24, "block_length": 8, "cfg_scale": 0.5},
]


def locally(lm, prompt, body: dict, number: int = 0):
    """The same by the library, and by hand where a cap cuts it."""
    settings = {name: value for name, value in body.items() if name not in ("max_tokens", "n")}
    cap = body.get("max_tokens")
    if cap is not None:
        attention = lm.config.attention
        family = lm.config.block_length if attention == "block_causal" else 1 if attention == "causal" else min(32, cap)
        block = family if attention == "causal" else settings.get("block_length", family)
        settings["gen_length"] = math.ceil(cap / block) * block
    result = dlm.generate(lm, [plain(prompt)], num_samples=body.get("n", 1), **settings)[number]
    if cap is None or len(result.tokens) <= cap:
        return result.text, result.tokens, result.finish_reason
    return lm.decode(result.tokens[:cap]), result.tokens[:cap], "length"


@pytest.mark.parametrize("body", SETTINGS, ids=str)
@pytest.mark.parametrize("family", ["diffusion", "blockwise", "causal"])
def test_whole_and_streamed_are_what_generate_gives(family, body, request):
    running = request.getfixturevalue(family)
    lm, attention = running.server.lm, running.server.lm.config.attention
    if (attention != "bidirectional" and body.keys() & {"remask_threshold", "strategy", "cfg_scale"}) or (
        attention == "causal" and "block_length" in body
    ):
        pytest.skip("not of this family")
    asked = {"prompt": WORDS[2], **body}
    text, tokens, reason = locally(lm, WORDS[2], body)
    answer = running.post(asked).json()
    chunks = running.chunks({**asked, "stream_options": {"include_usage": True}})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    assert streamed(chunks) == text
    assert chunks[-2]["choices"][0]["finish_reason"] == reason
    assert chunks[-1]["choices"] == []
    given, usages = len(lm.encode(WORDS[2])), (answer["usage"], chunks[-1]["usage"])
    for usage in usages:
        assert usage.pop("prompt_tokens_details")["cached_tokens"] <= given
    assert (
        usages[0]
        == usages[1]
        == {
            "prompt_tokens": given,
            "completion_tokens": len(tokens),
            "total_tokens": given + len(tokens),
        }
    )


def test_holes_of_a_stranger_are_text(diffusion):
    lm, prompt = diffusion.server.lm, WORDS[3]
    ids = [*b"x = [MASK] + \\[MASK:3]"]
    assert lm.tokenizer.encode(prompt, special=False) == [lm.encode(chr(byte))[0] for byte in ids]
    told = diffusion.text({"prompt": prompt, "max_tokens": 8})
    assert told == dlm.generate(lm, [lm.tokenizer.encode(prompt, special=False)], gen_length=8)[0].text
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
    rendered = lm.chat([{"role": "user", "content": prompt}])
    expected = dlm.generate(lm, [lm.tokenizer.encode(rendered, special=False)], gen_length=8)[0].text
    assert diffusion.text(chat, "/v1/chat/completions") == expected


def test_tokens_are_those_that_a_prompt_has(causal, monkeypatch):
    lm = causal.server.lm
    monkeypatch.setitem(vars(lm.tokenizer), "begin", lm.encode("b"))
    for body, ids in [({}, lm.encode("bac")), ({"add_special_tokens": False}, lm.encode("ac"))]:
        answer = causal.post({"prompt": "ac", **body}, "/tokenize").json()
        assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    for prompt in ("ac", lm.encode("bac")):
        answer = causal.post({"prompt": prompt, "max_tokens": 4}).json()
        assert answer["usage"]["prompt_tokens"] == 3


def test_chats_are_what_generate_gives(diffusion):
    lm = diffusion.server.lm
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = dlm.generate(lm, messages, gen_length=16, temperature=0.9, seed=4)[0]
    body = {"messages": messages, "max_completion_tokens": 16, "temperature": 0.9, "seed": 4}
    answer = diffusion.post(body, "/v1/chat/completions").json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": expected.text, "refusal": None}
    chunks = diffusion.chunks(body, "/v1/chat/completions")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed(chunks) == expected.text
    parts = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    back = {"role": "assistant", **message, "tool_calls": None, "audio": None}
    assert diffusion.text({**body, "messages": parts}, "/v1/chat/completions") == expected.text
    assert (
        diffusion.post({**body, "messages": [*messages, back, messages[1]]}, "/v1/chat/completions").status_code == 200
    )


def test_holes_are_filled_as_infill_does(diffusion):
    lm, prompt = diffusion.server.lm, "ab[MASK:3]cd[MASK]e"
    expected = dlm.infill(lm, [prompt], temperature=0.7, seed=6)[0]
    body = {"prompt": prompt, "infill": True, "temperature": 0.7, "seed": 6}
    answer = diffusion.post(body).json()
    assert answer["choices"][0]["text"] == expected.text and answer["dlm"]["holes"] == expected.holes
    assert streamed(diffusion.chunks(body)) == expected.text
    assert answer["usage"]["prompt_tokens"] == 5 and answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 0.7, "seed": 6}], ids=str)
def test_lengths_of_holes_are_chosen_as_infill_does(diffusion, more):
    """Also where other requests are decoded in the same forwards, and where it may wait for its turn."""
    lm, prompts = diffusion.server.lm, ["ab[MASK:2-6]cd[MASK:1-30]e", "x[MASK:3]y[MASK:1-4]"]
    own = {name: value for name, value in more.items() if name != "n"}
    expected = dlm.infill(lm, prompts, num_samples=more.get("n", 1), **own)
    body = {"prompt": prompts, "infill": True, **more}
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(diffusion.text, {"prompt": "abc", "max_tokens": 40, "seed": n}) for n in range(2)]
        answer, chunks = diffusion.post(body).json(), diffusion.chunks({**body, "stream_mode": "denoise"})
        assert all(other.result() for other in others)
    assert [choice["text"] for choice in answer["choices"]] == [result.text for result in expected]
    facts = answer["dlm"]["choices"]
    assert [fact["nfe"] for fact in facts] == [result.nfe for result in expected]
    assert [fact["holes"] for fact in facts] == [result.holes for result in expected]
    assert answer["usage"]["completion_tokens"] == sum(len(result.tokens) for result in expected)
    for number, result in enumerate(expected):
        assert streamed(chunks, number) == result.text
        layout = next(c["dlm"] for c in chunks if c["choices"][0]["index"] == number and "prompt_tokens" in c["dlm"])
        assert sum(end - start for start, end in layout["holes"]) == len(result.tokens)
    with live(config(engine={"max_num_requests": 2}, serve={"max_waiting": 40}), lm) as running:
        assert running.text({"prompt": prompts[0], "infill": True, **own}) == expected[0].text
        assert soon(running.settled)


def test_a_suffix_gives_the_middle(diffusion):
    lm = diffusion.server.lm
    expected = dlm.infill(lm, ["ab[MASK:5]\\[MASK]cd"], temperature=1.0, seed=1)[0]
    body = {"prompt": "ab", "suffix": "[MASK]cd", "max_tokens": 5, "temperature": 1.0, "seed": 1}
    assert diffusion.text(body) == streamed(diffusion.chunks(body)) == expected.holes[0]
    cut = diffusion.post({**body, "hole": 5, "max_tokens": 2}).json()
    assert cut["choices"][0]["text"] == lm.decode(expected.tokens[:2]) and cut["usage"]["completion_tokens"] == 2
    stop = expected.holes[0][1]
    assert diffusion.text({**body, "stop": stop}) == expected.holes[0].partition(stop)[0]


def test_cached_tokens_are_those_of_whole_pages_that_were_there():
    lm, prompt = model("llama"), "abcdefghij" * 4
    with live(config(engine={"page_size": 16}), lm) as running:

        def cached(prompt: str | list[str], **more) -> int:
            usage = running.post({"prompt": prompt, "max_tokens": 2, **more}).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert len(lm.encode(prompt)) == 40
        assert [cached(prompt), cached(prompt), cached(f"{prompt[:20]}other"), cached("z" + prompt)] == [0, 32, 16, 0]
        assert cached([prompt, prompt], n=2, temperature=1.0) == 64


def test_answers_are_numbered(diffusion):
    lm, body = diffusion.server.lm, {"prompt": ["a", "bc"], "n": 2, "max_tokens": 8, "temperature": 1.0, "seed": 9}
    expected = dlm.generate(lm, ["a", "bc"], num_samples=2, gen_length=8, temperature=1.0, seed=9)
    answer = diffusion.post(body).json()
    assert [choice["text"] for choice in answer["choices"]] == [result.text for result in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    chunks = diffusion.chunks(body)
    assert [streamed(chunks, number) for number in range(4)] == [result.text for result in expected]
    ids = [lm.encode("a"), lm.encode("bc")]
    assert diffusion.post({**body, "prompt": ids}).json()["choices"] == answer["choices"]
    assert diffusion.text({**body, "prompt": ids[1], "n": 1}) == expected[2].text


def test_a_random_seed_is_told_and_gives_the_same_again(diffusion):
    body = {"prompt": "a", "max_tokens": 12, "temperature": 1.0}
    first, other = diffusion.post(body).json(), diffusion.post(body).json()
    assert first["dlm"]["seed"] != other["dlm"]["seed"]
    assert diffusion.text({**body, "seed": first["dlm"]["seed"]}) == first["choices"][0]["text"]


def test_null_is_nothing(diffusion):
    body = {"prompt": "a", "max_tokens": 4}
    nothing = dict.fromkeys(("temperature", "n", "stop", "stream", "logprobs", "suffix", "tools", "threshold"))
    off = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "best_of": 1, "top_p": 1.0}
    assert diffusion.text({**body, **nothing, **off}) == diffusion.text(body)


def test_log_probabilities_are_those_at_the_commit(diffusion):
    """By hand: decode token by token, and read each forward's own distribution."""
    lm, prompt = diffusion.server.lm, "abc"
    canvas = torch.tensor([[*lm.encode(prompt), *[lm.mask_id] * 6]])
    expected = {}
    for _ in range(6):
        masked = canvas == lm.mask_id
        with torch.no_grad():
            log_p = lm.network.suppress(lm.predict(canvas, masked)).log_softmax(-1)
        best, where = log_p.max(-1)[0].argmax(), masked[0].nonzero()[:, 0]
        canvas[0, where[best]] = log_p[best].argmax()
        expected[int(where[best]) - 3] = log_p[best].topk(3)
    body = {"prompt": prompt, "max_tokens": 6, "logprobs": 3}
    told = diffusion.post(body).json()["choices"][0]["logprobs"]
    for place, (values, tokens) in expected.items():
        assert told["token_logprobs"][place] == pytest.approx(values[0].item(), abs=1e-4)
        alike: dict[str, float] = {}  # parts of characters share a text
        for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
            alike.setdefault(lm.decode([token], skip_special=False), value)
        assert told["top_logprobs"][place] == pytest.approx(alike, abs=1e-4)
        assert told["tokens"][place] == lm.decode([int(tokens[0])], skip_special=False)
    assert told["text_offset"] == list(range(6))
    in_chunks = [c["choices"][0]["logprobs"] for c in diffusion.chunks(body) if c["choices"][0].get("logprobs")]
    assert [p for part in in_chunks for p in part["token_logprobs"]] == told["token_logprobs"]
    assert [o for part in in_chunks for o in part["text_offset"]] == told["text_offset"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    content = diffusion.post(chat, "/v1/chat/completions").json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3 and all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in content)


def test_a_causal_model_scores_its_prompt(causal):
    lm, prompt = causal.server.lm, "abc def"
    answer = causal.post({"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}).json()["choices"][0]
    told = answer["logprobs"]
    assert answer["text"].startswith(prompt) and told["tokens"][:-1] == list(prompt)
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    for cut in range(1, len(prompt)):
        nats = dlm.score(lm, [(prompt[:cut], prompt[cut:])])[0].nats if prompt[cut - 1] != " " else None
        assert nats is None or -sum(told["token_logprobs"][cut:-1]) == pytest.approx(nats, abs=1e-3)
    for place, best in enumerate(told["top_logprobs"][1:], start=1):
        next_token = dlm.generate(lm, [lm.encode(prompt)[:place]], gen_length=1)[0].tokens[0]
        assert list(best) == [lm.decode([next_token], skip_special=False)]
        assert max(best.values()) >= told["token_logprobs"][place]
    assert causal.text({"prompt": prompt, "max_tokens": 1, "echo": True}) == answer["text"]


def test_denoising_is_told_step_by_step(diffusion):
    """Played back, the steps give the canvas; the chunks are ordinary ones beside."""
    lm, body = (
        diffusion.server.lm,
        {"prompt": "ab", "max_tokens": 12, "remask_threshold": 0.3, "temperature": 1.0, "seed": 3},
    )
    chunks = diffusion.chunks({**body, "stream_mode": "denoise"})
    layout, steps = chunks[0]["dlm"], [c["dlm"] for c in chunks if "commit" in c.get("dlm", {})]
    assert layout["prompt_tokens"] == 2 and layout["holes"] == [[2, 14]]
    canvas: dict[int, int] = {}
    for step in steps:
        for position, token, text, p in [*step["commit"], *step["edit"]]:
            assert text == lm.decode([token], skip_special=False) and 0 < p <= 1
            canvas[position] = token
        for position in step["remask"]:
            del canvas[position]
    result = dlm.generate(lm, ["ab"], gen_length=12, remask_threshold=0.3, temperature=1.0, seed=3)[0]
    assert any(step["remask"] for step in steps)
    assert [canvas[position] for position in range(2, 2 + len(result.tokens))] == result.tokens
    assert streamed(chunks) == diffusion.text(body) == result.text
    assert [step["step"] for step in steps] == list(range(len(steps)))


@pytest.mark.slow
def test_many_at_once_are_what_each_is_alone():
    """Two hundred of mixed lengths, temperatures, seeds, holes, chats and stop strings, more than run at a time."""
    draw = random.Random(0)
    lm = model()
    asked = []
    for number in range(200):
        words = "".join(draw.choices("abcdef gh\n", k=draw.randint(1, 30)))
        body = {"temperature": draw.choice([0.5, 1.0]), "seed": number}
        if number % 5 == 0:
            hole = f"{words}[MASK:{draw.randint(1, 9)}]{words[::-1]}"
            asked.append(({**body, "prompt": hole, "infill": True}, dlm.infill(lm, [hole], **body)[0].text))
            continue
        body |= {"max_tokens": draw.randint(1, 20)} | draw.choice([{}, {"stop": ["e", "\x02"]}, {"rule": "threshold"}])
        if number % 5 == 1:
            messages = [{"role": "user", "content": words}]
            prompt, body = lm.chat(messages), {**body, "messages": messages}
        else:
            prompt, body = words, {**body, "prompt": words}
        own = {name: value for name, value in body.items() if name not in ("messages", "prompt")}
        asked.append((body, locally(lm, prompt, own)[0]))
    patient = config(engine={"max_num_requests": 16}, serve={"max_wait": 600})
    with live(patient, lm) as running, ThreadPoolExecutor(200) as pool:

        def ask(entry):
            body, _ = entry
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            if body["seed"] % 2:
                return streamed(running.chunks(body, path))
            return running.text(body, path)

        assert list(pool.map(ask, asked)) == [expected for _, expected in asked]
        assert soon(running.settled)


def test_a_draft_changes_no_text(causal):
    body = {"prompt": "abcabcabc", "max_tokens": 16, "temperature": 0.8, "seed": 2}
    with live(config(draft={"model": "ngram"}), causal.server.lm) as running:
        assert running.text({**body, "draft_length": 2}) == causal.text(body) == streamed(running.chunks(body))
    assert causal.post({**body, "draft_length": 2}).status_code == 400
