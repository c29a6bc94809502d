"""Other people's clients against a running server, unmodified: they read what we send as if OpenAI had sent it."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

import dlm
from tests.serving.live import WORDS, config, live, model

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("default")]  # theirs are not ours to mend
pytest.importorskip("openai", reason="bash scripts/test --outside brings it")

CASES = [
    {"max_tokens": 12, "temperature": 0.9, "seed": 5},
    {"max_tokens": 24, "temperature": 1.0, "seed": 8, "stop": ["a", "e"]},
    {"max_tokens": 9, "extra_body": {"rule": "threshold", "threshold": 0.4}},
]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def running():
    with live(config(), model()) as running:
        yield running


def joined(chunks) -> str:
    return "".join(c.text if hasattr(c, "text") else c.delta.content or "" for chunk in chunks for c in chunk.choices)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_openai(running, settings):
    import openai

    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        assert [entry.id for entry in client.models.list()] == ["tiny"]
        for prompt in WORDS:
            ours = {**settings, **settings.get("extra_body", {})}
            ours.pop("extra_body", None)
            expected = running.text({"prompt": prompt, **ours})
            whole = client.completions.create(model="tiny", prompt=prompt, **settings)
            assert whole.choices[0].text == expected
            assert joined(client.completions.create(model="tiny", prompt=prompt, stream=True, **settings)) == expected
        answer = client.chat.completions.create(model="tiny", messages=CHAT, **settings)
        stream = client.chat.completions.create(model="tiny", messages=CHAT, stream=True, **settings)
        assert joined(stream) == answer.choices[0].message.content
        again = [*CHAT, answer.choices[0].message, *CHAT]
        assert client.chat.completions.create(model="tiny", messages=again, max_tokens=4).usage.completion_tokens == 4


def test_openai_with_tasks(running):
    import openai

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:

            async def one(seed: int) -> str:
                settings = {"model": "tiny", "messages": CHAT, "max_tokens": 12, "temperature": 1.0, "seed": seed}
                whole = await client.chat.completions.create(**settings)
                stream = await client.chat.completions.create(stream=True, **settings)
                assert joined([chunk async for chunk in stream]) == whole.choices[0].message.content
                return whole.choices[0].message.content or ""

            return await asyncio.gather(*map(one, range(8)))

    lm = running.server.lm
    assert asyncio.run(ask()) == [
        dlm.generate(lm, CHAT, gen_length=12, temperature=1.0, seed=seed)[0].text for seed in range(8)
    ]


def test_openai_raises_what_we_refuse(running):
    import openai

    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError, match="only read by the rules") as caught:
            client.completions.create(model="tiny", prompt="a", extra_body={"threshold": 0.5})
        assert caught.value.param == "threshold"
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-5'"):
            client.completions.create(model="gpt-5", prompt="a")
        engine = running.server.runner.engine
        step = engine.batch.stepper.run

        def run(scheduled):
            if any(item.sequence.step == 2 for item in scheduled):
                engine.batch.stepper.run = step
                raise RuntimeError("out of memory")
            return step(scheduled)

        engine.batch.stepper.run = run
        with pytest.raises(openai.APIError, match="out of memory"):
            list(client.completions.create(model="tiny", prompt="a", max_tokens=8, stream=True))


def test_litellm(running, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    settings = {"model": "openai/tiny", "api_base": f"{running.url}/v1", "api_key": "none", "messages": CHAT}
    settings |= {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    whole = litellm.completion(**settings).choices[0].message.content
    assert whole == running.text(
        {"messages": CHAT, "max_tokens": 12, "temperature": 1.0, "seed": 3}, "/v1/chat/completions"
    )
    assert joined(litellm.completion(stream=True, **settings)) == whole


def test_llm(running, tmp_path):
    """Simon Willison's `llm`: a model in its YAML file, then its command."""
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: tiny\n  api_base: {running.url}/v1\n  api_key_name: none\n"
    )
    (tmp_path / "keys.json").write_text('{"none": "none"}')
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    expected = running.text({"messages": CHAT, "max_tokens": 12, "seed": 3}, "/v1/chat/completions")
    for stream in ([], ["--no-stream"]):
        command = [
            sys.executable,
            "-m",
            "llm",
            "-m",
            "mine",
            *stream,
            "-n",
            "-o",
            "max_tokens",
            "12",
            "-o",
            "seed",
            "3",
            "hi",
        ]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
        assert done.stdout.decode().rstrip("\n") == expected.rstrip("\n"), done.stderr.decode()


TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{target}"
{more}
"""
GENERATED = (
    "generation_kwargs: {until: ['Question:'], max_gen_toks: 24, do_sample: false}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"
)


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_lm_eval_over_http_is_lm_eval_in_process(running, kind, tmp_path):
    """The same questions by our own harness model and over HTTP: the same requests and the same texts."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"question": f"What is {n} + {n + 3}?", "answer": str(2 * n + 3)}) for n in range(20))
    )
    text = TASK.format(file=tmp_path / "data.jsonl", kind="generate_until", target="{{answer}}", more=GENERATED)
    (tmp_path / "sums.yaml").write_text(text)
    tasks = TaskManager(include_path=str(tmp_path))
    path = "chat/completions" if "chat" in kind else "completions"
    arguments = (
        f"model=tiny,base_url={running.url}/v1/{path},num_concurrent=4,tokenizer_backend=none,tokenized_requests=False"
    )
    found = lm_eval.simple_evaluate(
        kind,
        arguments,
        tasks=["sums"],
        task_manager=tasks,
        apply_chat_template="chat" in kind,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["sums"], key=lambda sample: sample["doc_id"])
    assert len(samples) == 20
    lm = running.server.lm
    for sample in samples:
        question = f"Question: {sample['doc']['question']}\nAnswer:"
        prompt = [{"role": "user", "content": question}] if "chat" in kind else question
        settings = {"gen_length": 24, "seed": 1234, "stop": ["Question:"]}
        assert sample["resps"][0][0] == dlm.generate(lm, [prompt], **settings)[0].text


def test_lm_eval_scores_with_a_causal_model(tmp_path):
    """`echo` with log-probabilities, through lm-eval's own remote tokenizer: the sums of dlm.score."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    (tmp_path / "data.jsonl").write_text(
        "\n".join(
            json.dumps({"question": f"{n} + 3", "choices": ["seven", "a fox"], "answer": n % 2}) for n in range(6)
        )
    )
    more = "doc_to_choice: choices\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"
    text = TASK.format(file=tmp_path / "data.jsonl", kind="multiple_choice", target="{{answer}}", more=more)
    (tmp_path / "sums.yaml").write_text(text)
    with live(config(), model("llama")) as running:
        arguments = f"model=tiny,base_url={running.url}/v1/completions"
        found = lm_eval.simple_evaluate(
            "local-completions",
            arguments,
            tasks=["sums"],
            task_manager=TaskManager(include_path=str(tmp_path)),
            bootstrap_iters=0,
        )
        for sample in found["samples"]["sums"]:
            question = f"Question: {sample['doc']['question']}\nAnswer:"
            pairs = [(question, f" {choice}") for choice in sample["doc"]["choices"]]
            expected = [-score.nats for score in dlm.score(running.server.lm, pairs)]
            assert [response[0][0] for response in sample["resps"]] == pytest.approx(expected, abs=1e-3)
