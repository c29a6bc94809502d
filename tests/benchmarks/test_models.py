import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dlm.data.config import DataConfig
from dlm.evaluation.filling import Filling
from dlm.models import LM, Transformer
from tests.evaluation.knowing import SHAPE, sudoku_lm
from tests.evaluation.test_card import run_folder
from tests.inference.tiny import text_lm


@pytest.fixture
def models(script) -> ModuleType:
    return script("models")


def saved(folder: Path, kind: str) -> str:
    import torch

    lm = sudoku_lm([]) if kind == "sudoku" else text_lm(model_type="dlm", mask_in_softmax=False, **SHAPE)
    network = Transformer(lm.config)
    network.initialise(torch.Generator().manual_seed(0))
    LM(network, lm.tokenizer, kind).save(folder)
    return str(folder)


def test_sudoku_to_card(models, tmp_path, monkeypatch, capsys):
    main = Filling(rule="low_confidence", tokens_per_step=81, name="all at once")
    monkeypatch.setattr(models.sudoku, "MAIN", (main,))
    sweep = tuple(Filling(rule=rule, tokens_per_step=9) for rule in ("margin", "random"))
    monkeypatch.setattr(models.sudoku, "SWEEP", sweep)
    folder = saved(tmp_path / "model", "sudoku")
    run = run_folder(tmp_path / "run", {})
    common = ["sudoku", "--model", folder, "--output", str(tmp_path)]
    assert models.main([*common, "--puzzles", "3", "--sweep", "1"]) == 0
    report = json.loads((tmp_path / "models-sudoku.json").read_text())
    assert [len(table["rows"]) for table in report["tables"]] == [1, 2]
    assert report["results"][0]["solved"]["total"] == 3
    assert models.main([*common, "--reuse", "--run", str(run), "--card", "--hardware", "an abacus"]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "an abacus" in card
    assert "| margin 9/step |" in card
    assert "Main rules" in capsys.readouterr().out


def test_code_to_card(models, tmp_path, monkeypatch):
    source = "".join(f"def function_{i}(x):\n    return x * {i}\n\n" for i in range(60))
    (tmp_path / "code.py").write_text(source)
    text = DataConfig(source="text", paths=(f"{tmp_path}/*.py",), heldout_paths=(f"{tmp_path}/*.py",), cache=False)
    monkeypatch.setattr(models, "STDLIB", text)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "if x:\n", "canonical_solution": "    y = 1", "suffix": "\n"}))
    folder = saved(tmp_path / "model", "code")
    argv = ["pico", "--model", folder, "--output", str(tmp_path), "--lines", "3", "--sequences", "2", "--length", "64"]
    assert models.main([*argv, "--infilling", str(tasks)]) == 0
    report: dict[str, Any] = json.loads((tmp_path / "models-pico.json").read_text())
    assert [table["title"].split(" ")[0] for table in report["tables"]] == ["Likelihood", "Single", "Single"]
    assert report["kind"] == "code"
    assert report["results"][1]["exact"]["total"] == 3


def test_bad_arguments(models, tmp_path, capsys):
    assert models.main(["sudoku", "--model", str(tmp_path / "none")]) == 2
    assert "error: no model" in capsys.readouterr().err
    folder = saved(tmp_path / "model", "sudoku")
    assert models.main(["mine", "--model", folder, "--reuse", "--output", str(tmp_path)]) == 2
    assert "run without it once" in capsys.readouterr().err
    for argv in (["--model", "x"], ["sudoku", "--card"]):
        with pytest.raises(SystemExit):
            models.main(argv)
