"""A task from outside the package: one class and one line in TASKS, and it runs wherever the built-in ones do."""

import json

import pytest

from dlm.cli import bench
from dlm.evaluation import TASKS, Grade, Question, Task, evaluate
from dlm.inference.request import Generation
from tests.inference.tiny import text_lm
from tests.refusals import refused


class Backwards(Task):
    """Words to be written backwards."""

    WORDS = ("pan", "tool", "star")

    def questions(self, count, seed):
        return [Question(question=word, answer=word[::-1], source="backwards") for word in self.WORDS[:count]]

    def prompt(self, question):
        return f"Backwards: {question.question} "

    def grade(self, text, question):
        return Grade.of(text.strip() == question.answer, text.strip())


@pytest.fixture(autouse=True)
def backwards(monkeypatch):
    monkeypatch.setitem(TASKS, "backwards", Backwards())


def answering(lm, prompts, **settings):
    """Stands for `dlm.generate`: right on every word but the last."""
    texts = ["nap", "loot ", "star"]
    assert [lm.decode(prompt) for prompt in prompts] == [f"Backwards: {word} " for word in Backwards.WORDS]
    assert settings == {"seed": 0, "gen_length": 8}
    return [Generation(text=t, tokens=[1], nfe=1, tpf=1.0, finish_reason="length", request_id="0") for t in texts]


def test_by_the_library(monkeypatch):
    monkeypatch.setattr("dlm.inference.generation.generate", answering)
    found = evaluate(text_lm(), "backwards", gen_length=8)
    assert [grade.correct for grade in found.grades] == [True, True, False]
    assert (found.right.hits, found.right.total) == (2, 3)


def test_as_rows_of_a_dataset(monkeypatch, tmp_path):
    rows = [{"question": word, "answer": word[::-1], "source": "backwards"} for word in Backwards.WORDS]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"question": "1+1", "source": "gsm8k"}])))
    monkeypatch.setattr("dlm.inference.generation.generate", answering)
    assert evaluate(text_lm(), tmp_path / "q.jsonl", source="backwards", gen_length=8).right.hits == 2


@pytest.mark.slow
def test_by_the_command(tmp_path, capsys):
    text_lm().save(tmp_path / "m")
    words = "infer --dataset backwards --max-tokens 8 --block-length 4 --skip-vanilla --infer.compared 0"
    output = tmp_path / "b.json"
    assert bench.main([*words.split(), "--model", str(tmp_path / "m"), "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["sources"]["backwards"]["engine"]["total"] == 3
    assert "backwards" in capsys.readouterr().out


def test_something_else_than_a_model():
    refused(r"evaluate\(\): expected a loaded model, not .pico.", evaluate, "pico", "backwards")
