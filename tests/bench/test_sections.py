"""Training and tokenizer at tiny scale: that they run, and that their figures are those of their parts."""

import numpy as np
import pytest

from dlm.bench import tokenizer, train
from dlm.bench.config import BenchConfig
from dlm.bench.run import SECTIONS, SUBCOMMANDS, wanted
from dlm.errors import UserError
from tests.refusals import refused


def config(**sections) -> BenchConfig:
    return BenchConfig.model_validate(sections)


def silent(line: str) -> None:
    return


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
    assert wanted(config(load={}, train={}), "infer") == ["infer", "load"]
    assert wanted(config(train={}, load={}), None) == ["load", "train"]
    assert {name for names in SUBCOMMANDS.values() for name in names} == SECTIONS.keys()
    refused("nothing to measure: say which", wanted, config(), None)
