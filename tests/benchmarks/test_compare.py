"""benchmarks/compare.py: its configs are one run but for what a row is about, and its figures are what they say."""

import importlib.util
import json
import math
import tomllib
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import dlm
from dlm.training.loop import train
from tests.training.runs import config

ALONE = {"train.out", "train.init_from", "train.lr", "data", "objective", "align"}


@pytest.fixture
def compare(script):
    return script("compare")


def test_rows_differ_in_what_they_are_about_alone(compare):
    shared = compare.row_config("ar", 0, Path("runs/compare")).model_dump()
    for name in compare.ROWS:
        own = tomllib.loads((compare.CONFIGS / f"{name}.toml").read_text())
        said = {f"{s}.{k}" if s == "train" else s for s, values in own.items() for k in values}
        assert said <= ALONE
        config = compare.row_config(name, 0, Path("runs/compare")).model_dump()
        new = config["train"]["init_from"] is None
        assert all(config[s] == shared[s] for s in (*["model"] * new, "optim", "eval"))
        assert all(config["train"][k] == shared["train"][k] for k in ("steps", "batch_size", "length", "seed"))


def test_paths_are_those_of_the_seed(compare):
    config = compare.row_config("trajectories", 2, Path("/x"))
    assert (config.train.out, config.train.init_from) == ("/x/trajectories-2", "/x/random-2")
    assert (config.train.tokenizer, config.data.paths) == ("/x/tokenizer", ("/x/traces-2.db",))
    assert config.train.seed == 2


def test_an_extra_file_is_merged_last(compare, tmp_path):
    (tmp_path / "extra.toml").write_text("[train]\nsteps = 100\n")
    config = compare.row_config("block", 0, tmp_path, tmp_path / "extra.toml")
    assert (config.train.steps, config.train.batch_size, config.objective.block_length) == (100, 12, 4)


@pytest.mark.parametrize("masking", ["causal", "random"])
def test_revealed_costs_what_the_model_says(compare, tmp_path, monkeypatch, masking):
    """One block and no confidence: a forward. A token a forward under causal sight: the likelihood."""
    lm = dlm.load(train(config(tmp_path, train__steps="2", objective__masking=masking)).folder)
    monkeypatch.setattr(compare, "GIVEN", 4)
    ids = torch.randint(2, lm.config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(0))
    sizes = torch.ones(lm.config.vocab_size, dtype=torch.long)
    found = compare.revealed(lm, ids, 2.0 if masking == "causal" else 1e-9, sizes)
    asked = (torch.arange(12) >= 4).expand_as(ids)
    with torch.no_grad():
        p = lm.predict(ids if masking == "causal" else torch.where(asked, lm.mask_id, ids), asked).log_softmax(-1)
    bits = -p.gather(-1, ids[asked][:, None]).sum().item() / math.log(2) / 24
    assert found["bits"] == pytest.approx(bits, rel=1e-5)
    assert found["tpf"] == (1 if masking == "causal" else 8)


def test_a_token_a_forward_reveals_the_surest_first(compare, tmp_path, monkeypatch):
    lm = dlm.load(train(config(tmp_path, train__steps="2")).folder)
    monkeypatch.setattr(compare, "GIVEN", 1)
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    nats = 0.0
    for row in ids:  # by hand
        masked = [1, 2, 3]
        while masked:
            canvas = row.clone()
            canvas[masked] = lm.mask_id
            asked = torch.zeros(1, 4, dtype=torch.bool)
            asked[0, masked] = True
            with torch.no_grad():
                p = lm.predict(canvas[None], asked).softmax(-1)
            best = int(p.amax(-1).argmax())
            nats -= math.log(p[best, row[masked.pop(best)]])
    found = compare.revealed(lm, ids, 2.0, torch.ones(lm.config.vocab_size, dtype=torch.long))
    assert (found["tpf"], found["bits"]) == (1.0, pytest.approx(nats / 6 / math.log(2), rel=1e-5))


def test_equal_quality_is_read_between_thresholds(script):
    grid = script("grid")
    frontier = [{"tpf": 1.0, "bits": 2.0}, {"tpf": 2.0, "bits": 2.2}, {"tpf": 4.0, "bits": 3.0}]
    assert grid.at_equal_quality(frontier, 2.1) == pytest.approx(1.5)
    assert grid.at_equal_quality(frontier, 2.0) == 1.0 and grid.at_equal_quality(frontier, 1.9) is None
    assert grid.at_equal_quality(frontier, 9.0) == 4.0


def result(bits, start=None, **more):
    curve = [(10, 1.0, bits + 1, 0.1), (20, 2.0, bits, 0.1)]
    frontier = [{"threshold": 2.0, "tpf": 1.0, "bits": bits}, {"threshold": 0.5, "tpf": 3.0, "bits": 1.2 * bits}]
    told = {"curve": curve, "bits": bits, "steps": 20, "tokens": 200, "seconds": 2.0, "tokens_per_second": 100.0}
    return {**told, "parameters": 9, "from": start, "peak_memory_mib": 50.0, "frontier": frontier, **more}


def test_rows_that_fail_fail_alone_and_what_is_finished_is_kept(compare, tmp_path, capsys, monkeypatch):
    for seed, less in enumerate((0.0, 0.1)):
        bits = {"ar": 2.0 - less, "scratch": 4.0, "random": 3.0 - less}
        for name, found in bits.items():
            (tmp_path / f"{name}-{seed}").mkdir()
            start = "ar" if name == "random" else None
            (tmp_path / f"{name}-{seed}" / "result.json").write_text(json.dumps(result(found, start)))
    (tmp_path / "block-0").mkdir()
    (tmp_path / "block-0" / "result.json").write_text(json.dumps(result(2.5)))

    def dies(words, **_):
        assert words[words.index("--child") + 1 :][:2] == ["block", "1"]  # the only one that is not finished
        return Namespace(returncode=2, stderr="warning\nUserError: no such thing\n")

    monkeypatch.setattr(compare, "machine", lambda: "a machine")
    monkeypatch.setattr(compare.subprocess, "run", dies)
    (tmp_path / "tokenizer").mkdir()
    rows = ["ar", "scratch", "block", "random"]
    words = ["--rows", *rows, "--seeds", "2", "--out", str(tmp_path), "--results", str(tmp_path / "r"), "--no-plot"]
    assert compare.main(words) == 0
    report, text = (
        json.loads((tmp_path / "r" / "compare.json").read_text()),
        (tmp_path / "r" / "compare.md").read_text(),
    )
    assert report["rows"]["block"] == {"failed": "UserError: no such thing"}
    assert report["rows"]["ar"]["bits"] == pytest.approx([1.95, 0.05])
    assert "1.950 ± 0.050" in text and "failed: UserError: no such thing" in text
    # `random` costs 5 % more than at a token a forward a quarter of the way to 20 % more: 1 + 2 / 4 tokens a forward.
    assert report["rows"]["random"]["tpf"] == pytest.approx([1.5, 0.0])
    assert report["rows"]["ar"]["tpf"][0] > 1.5 and report["rows"]["scratch"]["tpf"] is None
    assert report["claims"] == [
        "random reaches scratch's final bound at 50.0% ± 0.0% of the steps (validated every 10)."
    ]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plot`")
def test_the_plot(compare, tmp_path):
    results = {"ar": {0: result(2.0), 1: result(2.1)}, "block": {0: {"failed": "no"}}}
    results |= {"random": {n: result(3.0) for n in (0, 1)}}
    compare.plot(compare.summary(results), tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
