"""What is tried first: one text file, few settings, and the model that comes out of it."""

import json
from pathlib import Path

import pytest

import dlm
from dlm.cli import infer, train
from dlm.data.shards import read_manifest
from dlm.training.run import Run
from dlm.training.start import starting_point
from tests.training.runs import config, rows

TEXT = "\n\n".join(f"Chapter {i}.\nIt was the day {i} of {i * 7}, and it rained." for i in range(150))
SMALL = [
    *("--model.hidden_size", "16", "--model.num_hidden_layers", "1", "--model.num_attention_heads", "1"),
    *("--model.num_key_value_heads", "1", "--model.head_dim", "16", "--model.intermediate_size", "16"),
    *("--train.batch_size", "2", "--train.length", "64", "--eval.sequences", "2", "--train.device", "cpu"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An own folder with my.txt in it, and caches of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("named", [True, False], ids=["--train.tokenizer pico", "no tokenizer"])
def test_from_one_text_file_to_text(folder, capsys, named):
    words = ["--data.source", "text", "--data.paths", "my.txt", "--train.steps", "20", "--train.out", "out"]
    words += ["--train.tokenizer", "pico"] if named else []
    assert train.main([*words, *SMALL, "--eval.draws", "2" if named else "1"]) == 0
    out, err = capsys.readouterr()
    assert "out: the model after 20 steps" in out and "try it: dlm-infer --model out --prompt 'some text'" in err
    assert ("train.tokenizer is not set: taking that of pico" in err) != named
    assert ("(one draw: no error) nats/token" in err) != named
    (bound,) = (row for row in rows(Path("out")) if "bound" in row)
    assert (bound["bound_error"] is None) != named
    assert "NaN" not in Path("out", "metrics.jsonl").read_text()
    assert infer.main(["--model", "out", "--prompt", "It was", "--sampler.gen_length", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nfe"] >= 1


def test_prepare_takes_a_bundled_tokenizer(folder, capsys):
    words = ["--data.source", "text", "--data.paths", "my.txt", "--prepare", "shards", "--train.length", "64"]
    assert train.main([*words, "--train.tokenizer", "pico"]) == 0
    manifest = read_manifest(Path("shards"))
    assert manifest["tokenizer"] == dlm.load("pico").require_tokenizer().fingerprint
    assert set(manifest["splits"]) == {"train", "heldout"} and manifest["splits"]["heldout"][0]["samples"] >= 1


def test_a_tokenizer_is_named_as_a_model_is(folder):
    base = config(folder)
    for name, size in (
        ("pico", 8192),
        (str(folder / "tokenizer"), 283),
        (str(folder / "tokenizer/tokenizer.json"), 283),
    ):
        named = base.model_copy(update={"train": base.train.model_copy(update={"tokenizer": name})})
        assert starting_point(named).require_tokenizer().vocab_size == size


def test_a_start_without_a_tokenizer_says_so(folder, capsys):
    lm = starting_point(config(folder))
    lm.save(folder / "bare")
    (folder / "bare" / "tokenizer.json").unlink()
    words = ["--data.source", "text", "--data.paths", "my.txt", "--train.out", "out", *SMALL[-8:]]
    assert train.main([*words, "--model", "./bare"]) == 2
    assert "train.init_from = './bare' has no tokenizer.json, and text needs one" in capsys.readouterr().err
    assert train.main([*words, "--train.tokenizer", "./bare"]) == 2
    assert "bare holds no tokenizer.json: train one with dlm-tokenizer" in capsys.readouterr().err
    assert infer.main(["--model", "./bare", "--prompt", "x"]) == 2
    assert "model './bare' has no tokenizer: put a tokenizer.json into its folder" in capsys.readouterr().err
    run = Run(config(folder, train__init_from=str(folder / "bare")))  # with one of its own it goes
    assert run.model.lm.require_tokenizer().vocab_size == 283
