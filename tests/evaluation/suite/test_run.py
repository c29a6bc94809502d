"""The suite: what it measures of models that know the answer, killed and run again, and what it says of mistakes."""

import gzip
import json

import pytest

from dlm.cli import eval as command
from dlm.config import check
from dlm.errors import UserError
from dlm.evaluation.suite.config import EvalConfig
from dlm.evaluation.suite.report import table
from dlm.evaluation.suite.run import evaluate_all
from tests.evaluation.knowing import text_lm as knowing_lm
from tests.evaluation.test_programs import ADD, HOLE, LAST
from tests.inference.tiny import MASK, text_lm

ONE = {"name": "one", "tokens_per_step": 1}


def config_of(tmp_path, task, decoding=({"steps": 4, "name": "four"},), **settings) -> EvalConfig:
    tasks = [task] if isinstance(task, dict) else task
    settings = {"models": ["tiny"], "workers": 1, **settings}
    values = {
        "eval": settings,
        "task": tasks,
        "decoding": list(decoding),
        "output": {"file": str(tmp_path / "out.json")},
    }
    return check(EvalConfig, values, "test")


@pytest.fixture
def tiny(monkeypatch):
    lm = text_lm(seed=1)
    monkeypatch.setattr("dlm.models.loading.load", lambda name, **_: lm)
    return lm


def rows(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def test_infilling_of_a_model_that_knows(tmp_path, monkeypatch):
    multi = {**HOLE, "task_id": "two lines", "canonical_solution": "    c = a\n    c = c + b\n"}
    wrong = {**HOLE, "task_id": "wrong", "prompt": "def add(a, b):\n\n"}
    texts = ["def add(a, b):\n" + r["canonical_solution"] + r["suffix"] for r in (HOLE, multi)]
    texts.append("def add(a, b):\n\n    c = a - b\n    return c\n")
    encode = text_lm().encode
    texts = [encode(text) for text in texts]
    lm = knowing_lm(texts)
    monkeypatch.setattr("dlm.models.loading.load", lambda name, **_: lm)
    data = rows(tmp_path / "i.jsonl", [HOLE, multi, wrong])
    config = config_of(tmp_path, {"kind": "infilling", "data": data, "length": 200}, [ONE])
    (run,) = evaluate_all(config).values["runs"]
    found = {
        name: (run["metrics"][name]["hits"], run["metrics"][name]["total"]) for name in ("passed", "exact", "stripped")
    }
    assert found == {"passed": (2, 3), "exact": (2, 3), "stripped": (2, 3)}
    assert run["metrics"]["tpf"] == 1 and run["items"] == 3
    records = [json.loads(line)["record"] for line in (tmp_path / "out.records.jsonl").read_text().splitlines()]
    assert [r["passed"] for r in records] == [True, True, False] and records[2]["reason"] == "AssertionError"
    assert records[1]["text"] == "    c = a\n    c = c + b"


def everything(tmp_path):
    (tmp_path / "texts").mkdir(exist_ok=True)
    for i in range(6):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text number {i} about nothing at all\n" * 9)
    questions = [{"question": f"What is {i} + {i}?", "answer": str(2 * i), "source": "gsm8k"} for i in range(5)]
    with gzip.open(tmp_path / "h.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps({**ADD, "task_id": f"Mine/{i}"}) for i in range(3)))
    return [
        {"kind": "humaneval", "data": str(tmp_path / "h.jsonl.gz"), "gen_length": 8, "samples": 2, "k": [1, 2]},
        {"kind": "mbpp", "data": rows(tmp_path / "m.jsonl", [{**LAST, "task_id": i} for i in range(3)]), "gen_length": 8, "shots": 1},
        {"kind": "infilling", "data": rows(tmp_path / "i.jsonl", [HOLE]), "hole": "fixed", "hole_tokens": [3, 5], "name": "fixed"},
        {"kind": "infilling", "data": rows(tmp_path / "i.jsonl", [HOLE]), "hole": "unknown", "hole_range": [2, 4]},
        {"kind": "questions", "data": rows(tmp_path / "q.jsonl", questions), "gen_length": 8},
        {"kind": "bound", "data": str(tmp_path / "texts"), "length": 32, "draws": 2},
    ]  # fmt: skip


def test_every_kind_runs_and_killed_anywhere_it_gives_the_same_file(tmp_path, tiny):
    sampled = [
        {"name": "sampled", "temperature": 0.7, "steps": 4, "rule": "random"},
        {"name": "four", "steps": 4, "temperature": 0.5},
    ]
    config = config_of(tmp_path, everything(tmp_path), sampled, batch_size=2)
    steps = []
    evaluate_all(config, steps.append)
    file, records = tmp_path / "out.json", tmp_path / "out.records.jsonl"
    whole, lines = file.read_bytes(), records.read_bytes()
    values = json.loads(whole)
    assert len(values["runs"]) == 11 and {"tiny"} == values["about"]["models"].keys()
    fixed = next(run for run in values["runs"] if run["task"] == "fixed")
    assert fixed["items"] == 2 and fixed["metrics"]["by_length"].keys() == {"3", "5"}
    assert all(run["against"]["reference"] == "sampled" for run in values["runs"] if run["decoding"] == "four")
    assert "| tiny" in table(values)

    class Killed(BaseException):
        pass

    for at in (1, 4, len(steps) - 1):
        file.unlink()
        records.unlink()
        seen = []

        def stop(line, seen=seen, at=at):
            seen.append(line)
            if len(seen) > at:
                raise Killed

        with pytest.raises(Killed):
            evaluate_all(config, stop)
        with records.open("ab") as torn:
            torn.write(b'{"run": "half a li')
        again = []
        evaluate_all(config, again.append)
        assert file.read_bytes() == whole and len(again) < len(steps)
    assert sorted(records.read_bytes().splitlines()) == sorted(lines.splitlines())
    file.unlink()
    records.unlink()
    other = config.model_copy(update={"eval": config.eval.model_copy(update={"batch_size": 7})})
    evaluate_all(other)
    assert json.loads(file.read_bytes())["runs"] == values["runs"]


def test_other_settings_are_other_runs(tmp_path, tiny):
    task = {
        "kind": "questions",
        "data": rows(tmp_path / "q.jsonl", [{"question": "1?", "answer": "1", "source": "gsm8k"}]),
        "gen_length": 4,
    }
    for change in ({}, {"seed": 1}):
        evaluate_all(config_of(tmp_path, task, **change))
    lines = (tmp_path / "out.records.jsonl").read_text().splitlines()
    assert len({json.loads(line)["run"] for line in lines}) == 2
    done = []
    evaluate_all(config_of(tmp_path, {**task, "name": "renamed"}), done.append)
    assert done == []  # what it is called changes nothing
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "2?", "answer": "1", "source": "gsm8k"}))
    evaluate_all(config_of(tmp_path, task), done.append)
    assert len(done) == 1  # what the data hold does
    two = [{"question": f"{i}?", "answer": "1", "source": "gsm8k"} for i in (2, 3)]
    rows(tmp_path / "q.jsonl", two)
    evaluate_all(config_of(tmp_path, task), done.append)
    assert done[1].endswith("2 of 2")  # the first was done already
    before = len((tmp_path / "out.records.jsonl").read_text().splitlines())
    evaluate_all(config_of(tmp_path, task, limit=1), done.append)
    assert len(done) == 2 and len((tmp_path / "out.records.jsonl").read_text().splitlines()) == before == 4


def causal(monkeypatch):
    lm = text_lm(seed=1, model_type="qwen3", attention="causal", shifted_logits=True)
    monkeypatch.setattr("dlm.models.loading.load", lambda name, **_: lm)
    return lm


def test_a_sweep_over_drafts_writes_the_same_texts(tmp_path, monkeypatch):
    causal(monkeypatch)
    questions = [{"question": "ab" * 9 + str(i), "answer": "1", "source": "gsm8k"} for i in range(3)]
    task = {"kind": "questions", "data": rows(tmp_path / "q.jsonl", questions), "gen_length": 16}
    values = {"eval": {"models": ["tiny"], "workers": 1}, "task": [task], "sweep": [{"draft": ["none", "ngram"]}]}
    config = check(EvalConfig, {**values, "output": {"file": str(tmp_path / "out.json")}}, "test")
    plain, drafted = evaluate_all(config).values["runs"]
    assert [plain["way"]["draft"], drafted["way"]["draft"]] == ["none", "ngram"]
    assert drafted["decoding"].endswith("draft=ngram") and "draft_nfe" in drafted["metrics"]
    assert drafted["metrics"]["tpf"] >= plain["metrics"]["tpf"] == 1
    lines = [json.loads(line) for line in (tmp_path / "out.records.jsonl").read_text().splitlines()]
    texts = [[line["record"]["text"] for line in lines if line["run"] == run] for run in {r["run"]: 0 for r in lines}]
    assert texts[0] == texts[1] and len(texts) == 2


def test_traces_of_every_item(tmp_path, tiny):
    from dlm import TraceStore

    tasks, ways = everything(tmp_path)[:4], [{"name": "four", "steps": 4, "temperature": 0.5}]
    plain = evaluate_all(config_of(tmp_path, tasks, ways)).values
    records = (tmp_path / "out.records.jsonl").read_bytes()
    (tmp_path / "out.records.jsonl").unlink()
    config = config_of(tmp_path, tasks, ways)
    config = config.model_copy(update={"output": config.output.model_copy(update={"traces": True})})
    assert evaluate_all(config).values == plain and (tmp_path / "out.records.jsonl").read_bytes() == records
    names = {f"{row['run']} {row['record']['item']}": row["record"] for row in map(json.loads, records.splitlines())}
    with TraceStore(tmp_path / "out.traces.db") as store:
        for name, record in names.items():
            several = record.get("samples", 1)
            traces = [store[name if several == 1 else f"{name}/{i}"] for i in range(several)]
            assert all(trace.steps.max() < record["nfe"] for trace in traces)
            assert sum((trace.steps >= 0).sum() for trace in traces) == record["tokens"]


MINE = """
from dlm.evaluation import Grade, Question, Task

class Backwards(Task):
    def questions(self, count, seed):
        return [Question(question=w, answer=w[::-1]) for w in ("pan", "tool", "star")[:count]]
    def prompt(self, question):
        return f"Backwards: {question.question} "
    def grade(self, text, question):
        return Grade.of(text.strip() == question.answer, text)
"""


def test_the_command_with_a_task_of_one_s_own(tmp_path, capsys):
    text_lm().save(tmp_path / "m")
    (tmp_path / "mine.py").write_text(MINE)
    words = ["--model", str(tmp_path / "m"), "--eval.limit", "2", "--output.no-plot", "--eval.workers", "1"]
    out = tmp_path / "o.json"
    assert command.main(["--task", str(tmp_path / "mine.py"), "--output", str(out), *words]) == 0
    values = json.loads(out.read_text())
    assert values["runs"][0]["kind"] == "file" and values["runs"][0]["items"] == 2
    assert "file mine" in capsys.readouterr().out and out.with_suffix(".md").exists()
    assert command.main(["--again", str(out), "--output.no-plot"]) == 0
    assert "the same in every figure" in capsys.readouterr().out
    text_lm(seed=5).save(tmp_path / "m")
    out.with_suffix(".again.records.jsonl").unlink()
    assert command.main(["--again", str(out), "--output.no-plot"]) == 1
    assert "weights" in capsys.readouterr().out


BAD = [
    ({"kind": "humaneval"}, {}, 'task "humaneval": data is missing'),
    ({"kind": "humaneval", "data": "none.jsonl"}, {}, "none.jsonl cannot be read"),
    ({"kind": "file", "data": "none.py"}, {}, "none.py: no such file"),
    ({"kind": "sudoku"}, {}, "is no Sudoku model"),
    ({"kind": "perplexity"}, {}, "judge is missing"),
    ({"kind": "lines"}, {"decoding": [{"draft": "self"}]}, "a draft continues a text, and this task fills holes"),
    ({"kind": "questions", "data": "stdlib"}, {"decoding": [{"draft": "ngram"}]}, "guesses what a causal model writes next"),
    ({"kind": "lm_eval", "tasks": ["x"]}, {"decoding": [{"draft": "self"}]}, "this task is asked without a draft"),
    ({"kind": "questions", "data": "stdlib"}, {"decoding": [{"rule": "threshold", "tokens_per_step": 2}]}, "tokens_per_step is only read by the rules"),
]  # fmt: skip
REFUSED = [
    ({"kind": "sudoku", "shots": 3}, {}, "shots = 3 is only read by tasks of kind mbpp, lm_eval"),
    ({"kind": "infilling", "data": "x", "hole_tokens": [3]}, {}, 'hole_tokens = [3] is only read with hole = "fixed"'),
    ({"kind": "humaneval", "data": "x", "k": [3]}, {}, "k = [3] needs 3 samples of each problem"),
    ({"kind": "lm_eval"}, {}, "tasks = []: name tasks of lm-eval"),
    ({"kind": "sudoku"}, {"decoding": [{}, {}]}, 'two entries of [[decoding]] are called "as recommended"'),
    ({"kind": "sudoku"}, {"reference": "x"}, 'reference = "x" is no decoding'),
    ({"kind": "sudoku"}, {"decoding": [{"rule": "margin", "threshold": 0.5}]}, "threshold = 0.5 is only read"),
    (
        {"kind": "questions", "data": "x"},
        {"decoding": [{"draft_length": 3}]},
        "draft_length = 3 is only read with a draft",
    ),
    ({"kind": "sudoku"}, {"decoding": [{"steps": 3, "tokens_per_step": 2}]}, "give one of them"),
]


@pytest.mark.parametrize(("task", "settings", "says"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_cannot_run_is_said_before_anything_is_decoded(tmp_path, tiny, task, settings, says):
    with pytest.raises(UserError) as caught:
        evaluate_all(config_of(tmp_path, task, **settings))
    assert says in str(caught.value) and not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(("task", "settings", "says"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_settings_that_do_not_fit(tmp_path, task, settings, says):
    with pytest.raises(UserError) as caught:
        config_of(tmp_path, task, **settings)
    assert says in str(caught.value)


def test_nothing_to_do_and_nowhere_to_write(tmp_path, tiny):
    with pytest.raises(UserError, match="nothing to evaluate"):
        evaluate_all(config_of(tmp_path, []))
    with pytest.raises(UserError, match="no such folder"):
        evaluate_all(config_of(tmp_path / "none", {"kind": "lines"}))
    assert MASK in tiny.encode("[MASK]")


def test_again_keeps_what_was_named_though_it_is_the_default(tmp_path, tiny, capsys):
    tiny.save(tmp_path / "m")
    data = rows(tmp_path / "q.jsonl", [{"question": "1?", "answer": "1", "source": "gsm8k"}])
    (tmp_path / "c.toml").write_text(
        f'[[task]]\nkind = "questions"\ndata = "{data}"\ngen_length = 4\n[[decoding]]\nrule = "threshold"\nthreshold = 0.9\n'
    )
    out = tmp_path / "o.json"
    words = ["--config", str(tmp_path / "c.toml"), "--model", str(tmp_path / "m"), "--output", str(out)]
    assert command.main([*words, "--output.no-plot"]) == 0
    assert command.main(["--again", str(out), "--output.no-plot"]) == 0
    assert "threshold threshold=0.9" in out.with_suffix(".again.md").read_text()
    assert "the same in every figure" in capsys.readouterr().out


def test_what_a_model_recommends_is_its_own_run(tmp_path, tiny):
    """Temperature 0 by name is not the temperature that the model recommends, and a new recommendation is a new run."""
    task = {
        "kind": "questions",
        "data": rows(tmp_path / "q.jsonl", [{"question": "1?", "answer": "1", "source": "gsm8k"}]),
        "gen_length": 8,
    }
    ways = [{"name": "recommended"}, {"name": "cold", "temperature": 0.0}]
    done = []
    evaluate_all(config_of(tmp_path, task, ways), done.append)
    for temperature in (1.0, 0.8):
        tiny.generation["dlm"] = {"generate": {"temperature": temperature}}
        before = len(done)
        evaluate_all(config_of(tmp_path, task, ways), done.append)
        assert len(done) == before + 2
    lines = [json.loads(line) for line in (tmp_path / "out.records.jsonl").read_text().splitlines()]
    texts = [line["record"]["text"] for line in lines]
    assert len({line["run"] for line in lines}) == 6
    assert texts[1] == texts[3] == texts[5] == texts[0] and texts[2] != texts[0] != texts[4]


def test_a_task_of_one_s_own_that_changed_is_asked_anew(tmp_path, tiny):
    file, done = tmp_path / "mine.py", []
    for grade in ("question.answer", "''"):
        file.write_text(MINE.replace("question.answer", grade))
        evaluate_all(config_of(tmp_path, {"kind": "file", "data": str(file), "gen_length": 4, "limit": 1}), done.append)
    assert len(done) == 2


def test_sudoku_with_the_bundled_model(tmp_path):
    sweep = [{"rule": "margin", "tokens_per_step": [1, 4]}, {"rule": "threshold", "threshold": [0.9]}]
    values = {"eval": {"models": ["sudoku"], "limit": 4, "workers": 1}, "task": [{"kind": "sudoku"}], "sweep": sweep}
    config = check(EvalConfig, {**values, "output": {"file": str(tmp_path / "s.json")}}, "test")
    found = evaluate_all(config).values
    assert [run["decoding"] for run in found["runs"]] == ["margin 1/step", "margin 4/step", "threshold threshold=0.9"]
    assert found["runs"][0]["metrics"]["tpf"] == 1 and found["runs"][2]["metrics"]["tpf"] > 2
    text = table(found)
    assert "no decoding differs from the reference beyond chance" in text and "front" in text
