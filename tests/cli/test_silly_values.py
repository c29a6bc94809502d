import json
from pathlib import Path

import pytest

from dlm.bench.config import BenchConfig
from dlm.bench.report import Report
from dlm.cli import bench, infer, replay, trace
from dlm.cli.config import InferConfig
from dlm.evaluation.questions import load_questions
from dlm.fields import fields
from dlm.trace import TraceStore
from tests.cli.test_replay import store  # noqa: F401  a fixture
from tests.refusals import refused

VALUES = [
    "9" * 40,
    "9" * 5000,
    "",
    "[" * 5000,
    "\udcff",
    *["-1", "1e18", "nan", "inf", "é", "[[1]]", "{}", "null", "none"],
]
"""Too small, too large, of another type, no UTF-8 as Python hands it on."""


def ends_well(name: str, main, argv: list[str], capsys) -> None:
    try:
        status = main(argv)
    except BaseException as error:
        raise AssertionError(f"{name} {[word[:60] for word in argv]}") from error
    out, err = capsys.readouterr()
    assert status in (0, 1, 2), argv
    assert status != 2 or err.startswith(name.split()[0]), (argv, err)


@pytest.mark.parametrize(
    ("name", "room", "config"),
    [("dlm-infer", infer, InferConfig), ("dlm-bench", bench, BenchConfig)],
    ids=["infer", "bench"],
)
def test_every_key(name, room, config, capsys):
    for field in fields(config):
        for value in ("-1", "9" * 5000, "nan", "", "[[1]]", "\udcff"):
            key = field.key.replace(".N.", ".0.")
            ends_well(name, room.main, ["--print-config", f"--{key}={value}"], capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"batch_size = {'9' * 5000}", "my.toml: cannot be read as TOML: Exceeds the limit"),
        (f"batch_size = {'[' * 5000}", "my.toml: "),
        ("[output]\nsnapshots = 1000000000", "output.snapshots = 1000000000: must be less than or equal to 10000"),
        ("[output]\ndelay = nan", "output.delay = NaN: must be"),
    ],
)
def test_every_kind_of_toml(text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(text)
    assert infer.main(["--config", "my.toml", "--print-config"]) == 2
    assert message in capsys.readouterr().err


REPLAY = ["--steps", "--delay", "--html", "--fork-at", "--as", "--store"]
TRACE = [["ls", "--since"], ["ls", "-n"], ["show", ""], ["diff", ""], ["export", "--rows"], ["import", "--mask-id"]]
TRACE += [["gc", "--keep"], ["redact", ""], ["train-dict", "--size"], ["stats", "--store"]]


def test_every_option_of_replay(store, monkeypatch, tmp_path, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for value in VALUES:
        ends_well("dlm-replay", replay.main, [value], capsys)
        for option in REPLAY:
            ends_well("dlm-replay", replay.main, ["one", f"{option}={value}"], capsys)
        ends_well("dlm-replay", replay.main, ["bare", "--fork-at", "1", f"--sampler.steps={value}"], capsys)


def test_every_option_of_trace(store, monkeypatch, tmp_path, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for word, option in TRACE:
        for value in VALUES:
            rest = ["--", value] if not option else [f"{option}={value}"]
            rest += {"diff": ["one"], "export": ["folder"], "import": ["folder"]}.get(word, [])
            ends_well("dlm-trace", trace.main, [word, *rest], capsys)
    with TraceStore() as traces:
        assert {row.request_id for row in traces.ls()} == {"one", "bare"}  # nothing was thrown away by mistake


def test_every_field_of_a_request_line(command, tmp_path, capsys):
    rows = tmp_path / "in.jsonl"
    for key in ("prompt", "request_id", "title", "sudoku", "sampler", "model", "strange"):
        for text in ("-1", "1e999", "9" * 5000, "NaN", '""', '"\\ud800"', "[]", "{}", "null", "true", '{"a": 1}'):
            rows.write_text(f'{{"prompt": "a", "{key}": {text}}}\n' if key != "prompt" else f'{{"prompt": {text}}}\n')
            ends_well("dlm-infer", infer.main, ["--input", str(rows), "--model.name", "missing"], capsys)


@pytest.mark.parametrize("line", ["[" * 100_000, "9" * 5000, json.dumps({"question": "\ud800"}), "[]", "null"])
def test_every_kind_of_question(line, tmp_path, capsys):
    rows = tmp_path / "q.jsonl"
    rows.write_text(line)
    refused(r"q\.jsonl:1: ", load_questions, rows)


def test_a_report_that_cannot_be_written_is_found_out_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    for name in ("/proc/1/x.json", str(tmp_path / "file" / "x.json"), str(tmp_path), "/proc/x.json"):
        refused(r"output\.file = ", Report, BenchConfig.model_validate({"output": {"file": Path(name)}}), "machine")
