"""Wrong bodies, headers and paths: each has its status, and a message that names it. Nothing is ever answered 500."""

import base64
import hashlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm.inference.config import SamplerConfig
from dlm.serving.app import app_of
from dlm.serving.server import Server

from .live import config, live, model

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]
BAD: list[tuple[str, str, dict, int, str | None, str]] = [
    ("POST", "/v1/completions", {}, 400, "prompt", "prompt is missing"),
    ("POST", "/v1/completions", {"prompt": 5}, 400, "prompt", "must be a text, a list of token ids"),
    ("POST", "/v1/completions", {"prompt": None}, 400, "prompt", "prompt is missing"),
    ("POST", "/v1/completions", {"prompt": []}, 400, "prompt", "empty list"),
    ("POST", "/v1/completions", {"prompt": [1, "a"]}, 400, "prompt", "must be a text, a list of token ids"),
    ("POST", "/v1/completions", {"prompt": [[]]}, 400, "prompt", "must be a text, a list of token ids"),
    ("POST", "/v1/completions", {"prompt": [99999]}, 400, None, "outside the vocabulary of 258 tokens"),
    ("POST", "/v1/completions", {"prompt": [-1]}, 400, "prompt", "must be a text, a list of token ids"),
    ("POST", "/v1/completions", {"prompt": "a\ud800"}, 400, None, "half of a surrogate pair"),
    ("POST", "/v1/completions", {"prompt": "a", "model": "gpt-5"}, 404, "model", "no model 'gpt-5' here"),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 10**9}, 400, "max_tokens", "gives 4096 at most"),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens", "valid integer"),
    ("POST", "/v1/completions", {"prompt": "a", "max_token": 4}, 400, "max_token", 'did you mean "max_tokens"?'),
    ("POST", "/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature", "greater than or equal to 0"),
    ("POST", "/v1/completions", {"prompt": "a", "top_p": 0.5}, 400, "top_p", "only read with a temperature above 0"),
    (
        "POST",
        "/v1/completions",
        {"prompt": "a", "top_p": 1.5, "temperature": 1},
        400,
        "top_p",
        "less than or equal to 1",
    ),
    ("POST", "/v1/completions", {"prompt": "a", "n": 2}, 400, "n", "n = 2 is only read with a temperature above 0"),
    ("POST", "/v1/completions", {"prompt": "a", "n": 65, "temperature": 1}, 400, "n", "gives 64 at most"),
    ("POST", "/v1/completions", {"prompt": "a", "num_samples": 2}, 400, "num_samples", '"num_samples" is "n"'),
    (
        "POST",
        "/v1/completions",
        {"prompt": "a", "threshold": 0.5},
        400,
        "threshold",
        "only read by the rules threshold",
    ),
    ("POST", "/v1/completions", {"prompt": "a", "rule": "best"}, 400, "rule", "'low_confidence'"),
    (
        "POST",
        "/v1/completions",
        {"prompt": "a", "steps": 3, "max_tokens": 64},
        400,
        "steps",
        "not a multiple of the 2 blocks",
    ),
    ("POST", "/v1/completions", {"prompt": "a", "gen_length": 10, "block_length": 4}, 400, "gen_length", "make it 12"),
    ("POST", "/v1/completions", {"prompt": "a", "strategy": "tree"}, 400, "strategy", "block, multi_block"),
    ("POST", "/v1/completions", {"prompt": "a", "seed": -1}, 400, "seed", "greater than or equal to 0"),
    ("POST", "/v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop", "empty string stands everywhere"),
    ("POST", "/v1/completions", {"prompt": "a", "stop": 3}, 400, "stop", "must be a text, or a list of texts"),
    ("POST", "/v1/completions", {"prompt": "a", "stop": ["\udc00"]}, 400, None, "half of a surrogate pair"),
    ("POST", "/v1/completions", {"prompt": "a", "logprobs": 50}, 400, "logprobs", "less than or equal to 20"),
    ("POST", "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, 400, "logprobs", "no such thing"),
    ("POST", "/v1/completions", {"prompt": "a", "hole": 4}, 400, "hole", "only read with suffix"),
    ("POST", "/v1/completions", {"prompt": "a", "suffix": "b", "infill": True}, 400, "infill", "two ways"),
    ("POST", "/v1/completions", {"prompt": "a", "infill": True}, 400, None, "no hole to fill"),
    ("POST", "/v1/completions", {"prompt": "a[MASK:0]", "infill": True}, 400, None, "a number from 1 to"),
    ("POST", "/v1/completions", {"prompt": "[MASK:1-2]." * 65, "infill": True}, 400, "prompt", "of unknown length"),
    ("POST", "/v1/completions", {"prompt": "[MASK:60000]" * 99, "infill": True}, 400, "prompt", "gives 4096 at most"),
    (
        "POST",
        "/v1/completions",
        {"prompt": "[MASK]", "infill": True, "max_tokens": 4},
        400,
        "max_tokens",
        "leave max_tokens",
    ),
    ("POST", "/v1/completions", {"prompt": "[MASK]", "infill": True, "stop": "a"}, 400, "stop", "ends a continuation"),
    ("POST", "/v1/completions", {"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
    ("POST", "/v1/completions", {"prompt": "a", "logit_bias": {"1": 5}}, 400, "logit_bias", "not supported"),
    ("POST", "/v1/completions", {"prompt": "a" * 5000}, 400, None, "was made for 2048 positions"),
    ("POST", "/v1/completions", {"prompt": "a", "trace": True}, 400, "trace", "keeps no traces"),
    ("POST", "/v1/completions", {"prompt": "a", "stream_mode": "all"}, 400, "stream_mode", "'denoise'"),
    ("POST", CHAT, {"messages": []}, 400, "messages", "at least 1 item"),
    ("POST", CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "messages", "messages.0.role"),
    ("POST", CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "text parts"),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}, 400, "messages", "surrogate"),
    ("POST", CHAT, {"messages": USER, "tools": [{}]}, 400, "tools", '"tools" is not supported'),
    (
        "POST",
        CHAT,
        {"messages": USER, "response_format": {"type": "json_object"}},
        400,
        "response_format",
        "not supported",
    ),
    ("POST", CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "only read with logprobs"),
    ("POST", CHAT, {"messages": USER, "max_tokens": 2, "max_completion_tokens": 3}, 400, "max_tokens", "disagree"),
    ("POST", "/tokenize", {}, 400, None, "either prompt or messages"),
    ("POST", "/detokenize", {"tokens": [999]}, 400, "tokens", "outside the vocabulary"),
    ("GET", "/v1/models/other", {}, 404, "model", "no model 'other'"),
    ("GET", "/v1/traces/x", {}, 404, None, "keeps no traces"),
    ("GET", "/v2/answers", {}, 404, None, "no such route"),
    ("GET", "/v1/completions", {}, 405, None, "another method"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param", "words"), BAD, ids=[str(bad[1:3])[:70] for bad in BAD]
)
def test_each_mistake_has_its_answer(diffusion, method, path, body, status, param, words):
    answer = diffusion.client.request(
        method,
        path,
        content=json.dumps(body) if method == "POST" else None,
        headers={"content-type": "application/json"},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert words in error["message"] and error.keys() == {"message", "type", "param", "code"}
    assert "Input should" not in error["message"] and "Value error" not in error["message"]


RAW = [
    (b"", {}, 400, "must be a JSON object"),
    (b"{", {}, 400, "not valid JSON"),
    (b"[1]", {}, 400, "must be a JSON object"),
    (b'{"prompt": "a"}', {"content-type": "text/plain"}, 400, "must be a JSON object"),
    (b"[" * 100_000, {}, 400, "body"),
    (b'{"seed": ' + b"9" * 6000 + b"}", {}, 400, "body"),
    (b'{"prompt": "a", "temperature": NaN}', {}, 400, "temperature"),
    (b'{"prompt": "a", "temperature": Infinity}', {}, 400, "temperature"),
    (b'{"prompt": "\xff"}', {}, 400, "body"),
    (b" " * (2**20 + 1), {}, 413, "more than 1048576 bytes"),
]


@pytest.mark.parametrize(("content", "headers", "status", "words"), RAW, ids=[str(raw[0][:30]) for raw in RAW])
def test_bodies_that_are_none(diffusion, content, headers, status, words):
    headers = {"content-type": "application/json", **headers}
    answer = diffusion.client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text


def test_a_body_that_does_not_say_its_size_is_measured(diffusion):
    parts = (b" " * 2**16 for _ in range(40))
    assert diffusion.client.post("/v1/completions", content=parts).status_code == 413


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "a[MASK:1-3]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
FIELDS = [*SamplerConfig.model_fields, "prompt", "messages", "max_tokens", "n", "suffix", "hole", "infill", "echo"]
FIELDS += [
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "stream_mode",
    "model",
    "user",
    "trace",
    "tools",
    "logit_bias",
]
likely = {
    "prompt": st.sampled_from(["a", "a[MASK:2]b", ["a", "b"], [1, 2], [[3]], ""]),
    "messages": st.just(USER),
    "max_tokens": st.integers(1, 9),
    "gen_length": st.integers(1, 9),
    "steps": st.integers(1, 9),
    "block_length": st.integers(1, 5),
    "stream": st.booleans(),
    "infill": st.booleans(),
    "n": st.integers(1, 2),
}
bodies = st.dictionaries(st.sampled_from(FIELDS), st.none(), max_size=6).flatmap(
    lambda chosen: st.fixed_dictionaries(
        {
            "prompt": likely["prompt"],
            "max_tokens": likely["max_tokens"],
            **{name: likely.get(name, values) | values for name in chosen},
        }
    )
)


@settings(max_examples=150)
@given(body=bodies, chat=st.booleans())
def test_no_body_is_answered_500(diffusion, body, chat):
    if chat:
        body = {**body, "messages": body.get("messages", USER)}
        body.pop("prompt")
    answer = diffusion.client.post(
        CHAT if chat else "/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    if answer.status_code == 200 and "data:" in answer.text:
        assert answer.text.endswith("data: [DONE]\n\n")


def test_before_the_model_is_there():
    with live(load=False) as running:
        assert running.client.get("/health").status_code == 200
        for answer in (running.client.get("/ready"), running.post({"prompt": "a"})):
            assert answer.status_code == 503 and answer.headers["retry-after"]
        running.server.load()
        assert running.client.get("/ready").status_code == 200


def test_keys(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# two of them\nsk-first-key\n\nsk-second-key\n")
    store = {"enabled": True, "store": str(tmp_path / "traces.db")}
    with live(config(serve={"api_keys_file": str(file)}, trace=store)) as running:
        first, second = ({"authorization": f"Bearer sk-{name}-key"} for name in ("first", "second"))
        body = {"prompt": "a", "max_tokens": 4}
        for wrong in ({}, {"authorization": "Bearer sk-first-ke"}, {"authorization": "Basic sk-first-key"}):
            answer = running.post(body, headers=wrong)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/health", "/ready", "/metrics", "/docs"):
            assert running.client.get(path).status_code == 200
        assert running.client.get("/v1/models").status_code == 401
        trace = running.post(body, headers=first).json()["dlm"]["trace"]
        assert running.client.get(f"/v1/traces/{trace}", headers=first).json()["id"] == trace
        assert "<script" in running.client.get(f"/v1/traces/{trace}/page", headers=first).text
        hidden, missing = (running.client.get(f"/v1/traces/{name}", headers=second) for name in (trace, "none"))
        assert hidden.status_code == missing.status_code == 404
        assert hidden.json()["error"]["message"] == missing.json()["error"]["message"].replace("none", trace)
        assert "sk-first-key" not in running.client.get(f"/v1/traces/{trace}", headers=first).text


def test_origins():
    with live(config(serve={"cors_origins": ["https://a.example"]})) as running:
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        allowed = running.client.options("/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = running.client.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_the_page_has_a_policy(diffusion):
    """Everything it runs is in its policy by its digest; nothing comes from elsewhere, nothing is made of text."""
    answer = diffusion.client.get("/")
    policy, text = answer.headers["content-security-policy"], answer.text
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\son\w+=|\sstyle=", text)
    assert set(re.findall(r"https?://[^'\" ]+", text)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"serve": {"api_keys_file": "/nowhere"}}, "cannot be read"),
        ({"sampler": {"threshold": 0.5}}, "only read by the rules"),
        ({"sampler": {"seed": 3}}, "each request's own"),
        ({"engine": {"max_waiting": 3}}, "[serve] max_waiting"),
        ({"serve": {"cors_origins": ["example.org"]}}, "is no origin"),
    ],
)
def test_settings_that_make_no_server(sections, words):
    with pytest.raises(ValueError, match=".") as caught:
        Server(config(**sections), model())
    assert words in str(caught.value)


def test_routes_are_described():
    schema = app_of(Server(config(), model())).openapi()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/metrics"} <= schema["paths"].keys()
    fields = schema["components"]["schemas"]["CompletionBody"]["properties"]
    assert {name for name in SamplerConfig.model_fields if name != "num_samples"} <= fields.keys()
