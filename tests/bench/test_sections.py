"""Quality, training and tokenizer at tiny scale: that they run, and that their figures are those of their parts."""

import json

import numpy as np
import pytest
import torch

import dlm
from dlm.bench import quality, tokenizer, train
from dlm.bench.config import BenchConfig, QualitySection
from dlm.bench.quality import VARIANTS, ways
from dlm.bench.run import SECTIONS, SUBCOMMANDS, wanted
from dlm.bench.trials import Lines, Nats, Sudoku, Written, bound_of, fresh, options_of
from dlm.diffusion.unmask import RULES
from dlm.errors import UserError
from dlm.evaluation.lines import LineTask
from dlm.inference.request import Generation
from tests.inference.tiny import text_lm
from tests.refusals import refused


def config(**sections) -> BenchConfig:
    return BenchConfig.model_validate(sections)


def silent(line: str) -> None:
    return


def generation(tokens, text="", nfe=1) -> Generation:
    return Generation(text=text, tokens=list(tokens), nfe=nfe, tpf=1.0, finish_reason="length", request_id="0")


def test_every_rule_has_settings():
    assert VARIANTS.keys() == set(RULES) == set(QualitySection().rules)
    chosen = list(ways(QualitySection(rules=("threshold",))))
    assert {(way.strategy, way.cache) for way in chosen} == {
        ("whole", "none"),
        *((strategy, cache) for strategy in ("block", "multi_block") for cache in ("none", "prefix", "dual")),
    }
    assert len(chosen) == 7 * len(VARIANTS["threshold"])
    assert chosen[0].label == "threshold 0.95"


def test_sudoku_is_judged_by_its_rules():
    lm = dlm.load("sudoku")
    task = Sudoku(lm, QualitySection(puzzles=3))
    solved = [generation(s[p == 0]) for p, s in zip(task.puzzles.puzzles, task.puzzles.solutions, strict=True)]
    assert task.judge(solved).right.value == 1.0
    wrong = generation(np.roll(solved[0].tokens, 1))
    assert task.judge([wrong, *solved[1:]]).right.hits == 2
    refused("no Sudoku model", Sudoku, text_lm(), QualitySection())


def test_steps_of_a_pace():
    lm = dlm.load("sudoku")
    task = Sudoku(lm, QualitySection(puzzles=2, cells=16))
    masks = task.masks(0)
    pace = {"tokens_per_step": 4}
    whole, multi = (options_of(task, strategy, "margin", pace)[0] for strategy in ("whole", "multi_block"))
    shared = {"rule": "margin", "infill": True}
    assert whole == {**shared, "strategy": "block", "block_length": masks, "steps": -(-masks // 4)}
    assert multi == {**shared, "strategy": "multi_block", "block_length": 16, "steps": 4 * -(-masks // 16)}


@pytest.fixture
def python_files(monkeypatch):
    around = {"prefix": "def f(x):\n    " * 9, "suffix": "\ndef g(x): return x * x\n" * 4}
    texts = [LineTask(name=str(n), line=f"return {n}", **around) for n in range(2)]
    monkeypatch.setattr("dlm.evaluation.lines.heldout_lines", lambda data, count, seed, context: texts[:count])
    return texts


def test_lines_are_judged_by_the_files(python_files):
    lm = text_lm()
    task = Lines(lm, QualitySection(lines=2, context=24, hole_block=4, draws=1))
    assert [len(prompt) for prompt in task.prompts] == [24, 24]
    said = lm.encode(python_files[0].line)
    assert task.masks(0) == len(said)
    verdict = task.judge([generation(said), generation(said)])
    assert verdict.right is not None and (verdict.right.hits, verdict.right.total) == (1, 2)
    assert verdict.nats is not None and 0 < verdict.nats.value < 50
    own = task.truth()
    assert own.right is None and own.nats is not None
    assert options_of(task, "block", "margin", {})[0]["block_length"] == 4


def test_texts_written_on_are_judged_by_the_model(python_files):
    uniform = text_lm()
    torch.nn.init.zeros_(uniform.network.lm_head.weight)
    task = Written(uniform, QualitySection(lines=2, context=8, gen_length=4, block_length=4, draws=2))
    assert [len(prompt) for prompt in task.prompts] == [8, 8]
    verdict = task.judge([generation([1, 2, 1, 2]), generation([4])])
    assert verdict.right is None and verdict.nats is not None
    assert verdict.nats.value == pytest.approx(np.log(258), rel=0.01)
    assert verdict.fresh == 2 / 3
    assert task.truth().nats == pytest.approx(verdict.nats)
    assert options_of(task, "whole", "margin", {})[0]["gen_length"] == 4


def test_the_bound_is_of_what_was_written_only():
    lm, s = text_lm(), QualitySection(draws=3)
    text, here = np.arange(6), np.arange(6) == 5
    with torch.inference_mode():
        shown = torch.tensor([[0, 1, 2, 3, 4, lm.require_mask_id()]])
        logits = lm.network.predict(shown, torch.tensor([here.tolist()]))
    expected = -logits.double().log_softmax(-1)[0, 5].item()
    found = bound_of(lm, [text, text[:3], text], [here, np.arange(3) == 2, here], s)
    other = bound_of(lm, [text[:3]], [np.arange(3) == 2], s)
    assert found.value == pytest.approx((2 * expected + other.value) / 3, rel=1e-5)


def test_nats_of_texts_of_several_lengths():
    nats, tokens = np.array([2.0, 9.0, 4.0]), np.array([1, 3, 2])
    found = Nats.of(nats.tolist(), tokens.tolist())
    apart = nats - 2.5 * tokens
    assert found == Nats(2.5, pytest.approx(1.959964 * np.sqrt((apart**2).sum()) / 6))
    assert str(Nats(2.5, 0.25)) == "2.50 ± 0.25"


def test_fresh_pairs():
    assert fresh([[1, 2, 3], [1, 2]]) == 1.0
    assert fresh([[5, 5, 5, 5, 5]]) == 0.25
    assert fresh([[1], []]) is None


@pytest.mark.slow
def test_quality_on_sudoku():
    section = {"models": ("sudoku",), "puzzles": 2, "rules": ("margin",), "caches": ("none",)}
    found = quality.measure(config(quality=section), silent)
    rows = found.values["quality"]["sudoku"]
    assert len(rows) == 3 * 3
    assert not [row["error"] for row in rows if "error" in row]
    paced = [row["tpf"] for row in rows if row["strategy"] == "whole"]
    assert paced == sorted(paced) and paced[0] == 1.0
    assert len(found.points) == len(rows)
    assert {row["best"] for row in rows if "best" in row} == {"puzzles solved"}
    assert found.tables[0].title == "sudoku: quality against tokens a forward pass"
    assert found.values["equal_quality"] == found.tables[1].rows
    json.dumps(found.values)


@pytest.mark.slow
def test_quality_on_lines(python_files, monkeypatch):
    monkeypatch.setattr("dlm.bench.quality.load", lambda name, **where: text_lm())
    section = {"models": ("pico",), "lines": 2, "context": 24, "gen_length": 4, "block_length": 2, "draws": 1}
    section |= {"rules": ("threshold",), "caches": ("dual",), "strategies": ("block", "multi_block")}
    found = quality.measure(config(quality=section), silent)
    rows, settings = found.values["quality"]["pico"], 2 * len(VARIANTS["threshold"])
    assert len(rows) == 2 * (settings + 1)
    assert [row["task"] for row in rows if row["rule"] == "the file itself"] == [Lines.name, Written.name]
    assert {point.panel for point in found.points} == {
        "pico, lines filled in: lines exact",
        "pico, lines filled in: nats a token",
        "pico, texts written on: nats a token",
    }
    assert all(point.low <= point.quality <= point.high for point in found.points)
    json.dumps(found.values)


def test_a_way_the_engine_refuses_is_a_row(monkeypatch):
    def refuses(lm, engine):
        raise UserError("not with this family")

    section = {"models": ("sudoku",), "puzzles": 1, "rules": ("credit",), "strategies": ("whole",)}
    found = quality.measure(config(quality=section), silent, refuses)
    assert found.values["quality"]["sudoku"][0]["error"] == "not with this family"
    assert found.points == []


@pytest.mark.slow
def test_train():
    overrides = {"train.batch_size": 2, "train.compile": False, "train.ema": 0.0, "data.sudoku_pool": 4}
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 4, "intermediate_size": 16}
    overrides |= {f"model.{name}": size for name, size in shape.items()}
    section = {"config": "sudoku", "steps": 2, "warmup": 1, "overrides": overrides}
    row = train.measure(config(train=section), silent).values["train"]
    assert len(row["seconds"]) == 3
    assert row["tokens_per_second"] == pytest.approx(2 * 81 / np.median(row["seconds"][1:]))
    assert 0 < row["mfu"] < 100


def test_train_names_a_wrong_override(tmp_path):
    refused('unknown key "train.batchsize"', train.measure, config(train={"overrides": {"train.batchsize": 2}}), silent)


def test_tokenizer(tmp_path):
    (tmp_path / "t.txt").write_text("def f(x):\n    return x + 1\n" * 50)
    section = {"file": tmp_path / "t.txt", "repeats": 1}
    row = tokenizer.measure(config(tokenizer=section), silent).values["tokenizer"]
    assert row["exact"] and row["encode"] > 0 and row["decode"] > 0
    assert row["megabytes"] == pytest.approx(50 * 27 / 1e6)
    assert 1 < row["bytes_per_token"] < 10
    with pytest.raises(UserError, match=r"tokenizer.file = .*none: cannot be read"):
        tokenizer.measure(config(tokenizer={"file": tmp_path / "none"}), silent)


def test_what_is_run():
    assert wanted(config(), "infer") == ["infer"]
    assert wanted(config(load={}, quality={}, train={}), "infer") == ["infer", "load", "quality"]
    assert wanted(config(train={}, quality={}), None) == ["quality", "train"]
    assert {name for names in SUBCOMMANDS.values() for name in names} == SECTIONS.keys()
    refused("nothing to measure: say which", wanted, config(), None)


def test_one_text_has_no_error():
    found = Nats.of([3.0], [2])
    assert found == Nats(1.5, None) and str(found) == "1.50 (one text: no error)"
