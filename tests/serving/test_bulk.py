"""Bulk jobs: the same texts however they are cut, rows once and in order, and a job that was stopped goes on."""

import json

import pytest

import dlm
from dlm.config import check
from dlm.errors import UserError
from dlm.models import loading
from dlm.serving import bulk
from dlm.serving.batch_config import BatchConfig

from .live import model


@pytest.fixture
def lm(monkeypatch):
    lm = model()
    monkeypatch.setattr(loading, "load", lambda **_: lm)
    return lm


def job(tmp_path, rows, output="out", **sections) -> BatchConfig:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = {"input": str(file), "output": str(tmp_path / output), "rows_per_part": 4, **sections.pop("batch", {})}
    return check(
        BatchConfig, {"batch": batch, "sampler": {"gen_length": 8, "temperature": 1.0}, **sections}, "the test"
    )


def answers(tmp_path, output="out") -> list[dict]:
    parts = sorted((tmp_path / output).glob("part-*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


ROWS = [
    "plain",
    {"prompt": "a[MASK:3]b"},
    {"messages": [{"role": "user", "content": "hi"}], "id": "chat"},
    {"prompt": [1, 2, 3], "seed": 7, "sampler": {"gen_length": 12}},
    {"prompt": "wrong", "sampler": {"threshold": 0.5}},
    {"prompt": "a[MASK:2-5]b", "seed": 1},
    *({"prompt": f"row {number}"} for number in range(5)),
]


def test_rows_are_answered_as_generate_does(tmp_path, lm):
    config = job(tmp_path, ROWS)
    bulk.run(config, lambda line: None)
    found = answers(tmp_path)
    assert [row["id"] for row in found] == [0, 1, "chat", *range(3, 11)]
    assert "only read by the rules" in found[4]["error"] and "text" not in found[4]
    seeds = [bulk.seed_of(config, row) for row in ({"id": 0}, {"id": 1}, {"id": "chat"})]
    assert len(set(seeds)) == 3
    settings = {"temperature": 1.0}
    assert found[0]["text"] == dlm.generate(lm, ["plain"], gen_length=8, seed=seeds[0], **settings)[0].text
    filled = dlm.infill(lm, ["a[MASK:3]b"], seed=seeds[1], **settings)[0]
    assert (found[1]["text"], found[1]["holes"]) == (filled.text, filled.holes)
    chat = dlm.generate(lm, ROWS[2]["messages"], gen_length=8, seed=seeds[2], **settings)[0]
    assert found[2]["text"] == chat.text
    chosen = dlm.infill(lm, ["a[MASK:2-5]b"], seed=1, **settings)[0]
    assert (found[5]["text"], found[5]["holes"], found[5]["nfe"]) == (chosen.text, chosen.holes, chosen.nfe)
    assert found[3]["text"] == dlm.generate(lm, [[1, 2, 3]], gen_length=12, seed=7, **settings)[0].text


def test_texts_do_not_depend_on_parts(tmp_path, lm):
    for size in (1, 3, 64):
        bulk.run(job(tmp_path, ROWS, f"out{size}", batch={"rows_per_part": size}), lambda line: None)
    assert answers(tmp_path, "out1") == answers(tmp_path, "out3") == answers(tmp_path, "out64")


def test_a_job_that_was_stopped_goes_on(tmp_path, lm, monkeypatch):
    """Killed in its second part, and while it writes its third: the same rows, none twice, none decoded again."""
    config, whole = job(tmp_path, ROWS), job(tmp_path, ROWS, "whole")
    bulk.run(whole, lambda line: None)
    done, do, write = [], bulk.Worker.do, bulk.Folder.write

    def stopped(self, part):
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(part.name)
        return do(self, part)

    monkeypatch.setattr(bulk.Worker, "do", stopped)
    with pytest.raises(KeyboardInterrupt):
        bulk.run(config, lambda line: None)
    assert done == ["part-000000.jsonl"] and len(answers(tmp_path)) == 4

    def torn(self, name, text):
        if name == "part-000001.jsonl":
            (tmp_path / "out" / f"{name}.partial").write_text(text[:20])
            raise OSError("the disk is gone")
        write(self, name, text)

    monkeypatch.setattr(bulk.Worker, "do", do)
    monkeypatch.setattr(bulk.Folder, "write", torn)
    with pytest.raises(OSError, match="disk"):
        bulk.run(config, lambda line: None)
    monkeypatch.setattr(bulk.Folder, "write", write)
    said = []
    bulk.run(config, said.append)
    assert said[0] == "7 rows in 2 parts to do"
    assert answers(tmp_path) == answers(tmp_path, "whole")
    bulk.run(config, said.append)
    assert said[-1] == "0 rows in 0 parts to do"


def test_another_job_is_not_mixed_in(tmp_path, lm):
    bulk.run(job(tmp_path, ROWS), lambda line: None)
    with pytest.raises(UserError, match="another job"):
        bulk.run(job(tmp_path, ROWS, batch={"seed": 5}), lambda line: None)
    with pytest.raises(UserError, match="another job"):
        bulk.run(job(tmp_path, ROWS[:-1]), lambda line: None)


def test_parquet(tmp_path, lm):
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": f"r{n}", "prompt": f"row {n}"} for n in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    bulk.run(job(tmp_path, rows, "lines"), lambda line: None)
    bulk.run(job(tmp_path, rows, "table", batch={"input": str(tmp_path / "in.parquet")}), lambda line: None)
    assert answers(tmp_path, "lines") == answers(tmp_path, "table") and len(answers(tmp_path, "table")) == 5


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no row"),
        ([5], "expected a string or an object"),
        ([{"text": "a"}], 'unknown key "text"'),
        ([{"id": 1}], "either prompt or messages"),
        (["a", {"prompt": "b", "id": 0}], "is that of an earlier row"),
    ],
)
def test_rows_that_are_none(tmp_path, lm, rows, words):
    with pytest.raises(UserError, match=words):
        bulk.run(job(tmp_path, rows), lambda line: None)
    assert not answers(tmp_path)
