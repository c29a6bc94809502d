import json
from dataclasses import replace

import pytest

from dlm.bench import infer, traffic
from dlm.bench.comparison import agreement, compare
from dlm.bench.config import BenchConfig
from dlm.bench.infer import settings_of, vanilla_of
from dlm.bench.load import Together, serve
from dlm.evaluation.asking import prompt_ids
from dlm.evaluation.task import Question
from tests.bench.fake import Clock, FakeEngine
from tests.inference.tiny import byte_tokenizer, text_lm

QUESTIONS = [
    {"question": "half of twelve?", "answer": "6", "source": "gsm8k"},
    {"question": "half of four?", "answer": "2", "source": "gsm8k"},
    {"question": "what?", "answer": "", "source": "chat"},
]


@pytest.fixture
def dataset(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return str(file)


def config(**sections) -> BenchConfig:
    return BenchConfig.model_validate(sections)


class Engines:
    """Makes fake engines and remembers for which caches."""

    def __init__(self) -> None:
        self.caches, self.made = [], []

    def __call__(self, lm, config):
        self.caches.append(config.cache)
        self.made.append(FakeEngine(Clock()))
        return self.made[-1]


def test_the_keys_of_blockinfer(dataset):
    engines, lm = Engines(), text_lm()
    found = infer.measure(config(infer={"dataset": dataset, "max_tokens": 8}), lm, lambda line: None, engines)
    values = found.values
    keys = {"total_time", "total_tokens", "throughput", "avg_latency", "num_prompts", "accuracy", "correct", "total"}
    for run in ("blockinfer", "vanilla_llada"):
        assert keys <= values[run].keys()
        assert (values[run]["correct"], values[run]["total"], values[run]["accuracy"]) == (1, 2, 50.0)
        assert (values[run]["num_prompts"], values[run]["total_tokens"]) == (3, 24)
    assert {"throughput_speedup", "time_speedup", "accuracy_diff"} <= values["comparison"].keys()
    assert values["comparison"]["accuracy_diff"] == 0
    assert values["sources"]["gsm8k"]["engine"] == {"correct": 1, "total": 2, "accuracy": 50.0, "score": 50.0}
    assert values["agreement"]["cached_vs_uncached"] == {"tokens": 1.0, "requests": 1.0, "compared": 3}
    assert engines.caches == ["auto", "none", "none", "auto"]
    assert len(values["samples"]) == 3 and values["samples"][0]["engine"]["correct"] is True
    assert "correct" not in values["samples"][2]["engine"]
    json.dumps(values)
    assert found.tables[0].headings.keys() == {"measure", "blockinfer", "vanilla_llada", "ratio"}


def test_without_vanilla_or_comparison(dataset):
    section = {"dataset": dataset, "max_tokens": 8, "skip_vanilla": True, "compared": 0, "warmup": 0, "shown": 0}
    section["sampler"] = {"top_k": 3}
    engines = Engines()
    found = infer.measure(config(infer=section), text_lm(), lambda line: None, engines)
    assert {"vanilla_llada", "comparison", "agreement"}.isdisjoint(found.values)
    assert (engines.caches, found.notes) == (["auto"], [])
    assert found.tables[0].headings.keys() == {"measure", "blockinfer"}
    assert [settings["top_k"] for settings in engines.made[0].settings] == [3] * 3  # nothing was asked to warm up


def test_settings_and_plain_decoding(dataset):
    lm = text_lm()
    given = {"max_tokens": 64, "denoising_steps": 4, "rule": "threshold", "strategy": "multi_block"}
    section = config(infer=given).infer
    ours = settings_of(lm, section)
    assert (ours["gen_length"], ours["block_length"], ours["steps"]) == (64, 32, 8)
    theirs = vanilla_of(lm, section)
    assert (theirs["block_length"], theirs["steps"]) == (64, 64)
    assert (theirs["rule"], theirs["strategy"]) == ("low_confidence", "block")
    same = vanilla_of(lm, section.model_copy(update={"vanilla": "same"}))
    assert same == ours | {"strategy": "block"}
    aligned = text_lm(attention="block_causal", block_length=4)
    assert vanilla_of(aligned, section)["block_length"] == settings_of(aligned, section)["block_length"] == 4


def test_a_chat_template_is_used_only_where_there_is_one():
    question = Question(question="hi", source="chat")
    lm = text_lm()
    assert lm.decode(prompt_ids(lm, question)) == "hi"
    lm.tokenizer = byte_tokenizer()
    lm.tokenizer.settings["chat_template"] = "<{{ messages[0]['content'] }}>"
    assert lm.decode(prompt_ids(lm, question)) == "<hi>"


@pytest.mark.parametrize("template", [{}, {"chat_template": "<{{ messages[0]['content'] }}>"}])
def test_a_question_begins_as_the_tokenizer_has_texts_begin(template):
    lm = text_lm()
    lm.tokenizer = byte_tokenizer()
    lm.tokenizer.settings |= template
    before = prompt_ids(lm, question := Question(question="hi", source="chat"))
    lm.tokenizer.__dict__["begin"] = [7]
    assert prompt_ids(lm, question) == [7, *before]


def test_agreement_counts_positions_and_lengths():
    clock = Clock()
    settings = {"gen_length": 4, "block_length": 2}
    ours, others = (serve(FakeEngine(clock), [[1]] * 2, settings, Together(), clock=clock) for _ in range(2))
    assert agreement(ours, others) == {"tokens": 1.0, "requests": 1.0, "compared": 2}
    others.served[0].result = replace(others.served[0].result, tokens=[0, 1, 7])
    assert agreement(ours, others) == {"tokens": 6 / 8, "requests": 0.5, "compared": 2}


def test_compare():
    ours = {"throughput": 20.0, "total_time": 1.0, "accuracy": 50.0, "tpf": 2.0}
    theirs = {"throughput": 5.0, "total_time": 4.0, "accuracy": 75.0, "tpf": 1.0}
    found = compare(ours, theirs)
    assert found == {"throughput_speedup": 4.0, "time_speedup": 4.0, "accuracy_diff": -25.0, "tpf_ratio": 2.0}


def test_the_real_engine_agrees_with_itself(dataset):
    section = {"dataset": dataset, "max_tokens": 8, "block_length": 4}
    lm = text_lm()
    found = infer.measure(config(infer=section), lm, lambda line: None).values
    assert found["agreement"]["cached_vs_uncached"]["tokens"] == 1.0
    assert found["agreement"]["batched_vs_single"]["requests"] == 1.0
    assert found["blockinfer"]["tpf"] == pytest.approx(found["blockinfer"]["total_tokens"] / found["blockinfer"]["nfe"])
    assert found["blockinfer"]["forwards"] < found["vanilla_llada"]["forwards"] == found["vanilla_llada"]["nfe"]
    assert 0 < found["blockinfer"]["time_to_first_block"]["p50"] < found["blockinfer"]["latency"]["p50"]
    assert found["blockinfer"]["peak_memory_mib"] > 0


def test_traffic(dataset):
    load = {"rates": [200.0], "in_flight": [1, 2], "requests": 4}
    sections = config(infer={"dataset": dataset, "max_tokens": 8, "warmup": 0}, load=load)
    found = traffic.measure(sections, text_lm(), lambda line: None)
    runs = found.values["load"]
    assert [run["traffic"] for run in runs] == ["1 in flight", "2 in flight", "Poisson 200/s"]
    assert [run["num_prompts"] for run in runs] == [4, 4, 4]  # the three questions came round again
    assert [run["under_way"] for run in runs[:2]] == [1, 2]
    assert all(run["latency"]["p99"] >= run["latency"]["p50"] > 0 for run in runs)


def test_a_question_beyond_the_context_counts_as_failed(tmp_path):
    file = tmp_path / "d.jsonl"
    rows = [QUESTIONS[0] | {"question": "x" * 200}, *QUESTIONS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"dataset": str(file), "max_tokens": 8, "block_length": 4, "warmup": 1}
    lm = text_lm(max_position_embeddings=100)
    found = infer.measure(config(infer=section), lm, lambda line: None).values
    for way in ("blockinfer", "vanilla_llada"):
        assert (found[way]["num_prompts"], found[way]["failed"]) == (4, 1)
