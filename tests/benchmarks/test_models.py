"""The card's script: it renders what `dlm-eval` measured of the same weights, and nothing else."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from dlm.cli import eval as command
from dlm.models import LM, Transformer
from tests.evaluation.knowing import SHAPE, sudoku_lm
from tests.evaluation.test_card import run_folder
from tests.inference.tiny import text_lm


@pytest.fixture
def models(script) -> ModuleType:
    return script("models")


def saved(folder: Path, kind: str, seed: int = 0) -> str:
    import torch

    lm = sudoku_lm([]) if kind == "sudoku" else text_lm(model_type="dlm", mask_in_softmax=False, **SHAPE)
    network = Transformer(lm.config)
    network.initialise(torch.Generator().manual_seed(seed))
    LM(network, lm.tokenizer, kind).save(folder)
    return str(folder)


def measured(tmp_path: Path, folder: str, words: str) -> str:
    output = str(tmp_path / "results.json")
    assert command.main([*words.split(), "--model", folder, "--output", output, "--output.no-plot"]) == 0
    return output


def test_sudoku_to_card(models, tmp_path, capsys):
    folder = saved(tmp_path / "model", "sudoku")
    results = measured(tmp_path, folder, "--config eval/sudoku-card --eval.limit 2")
    rows = [line for line in Path(results).with_suffix(".md").read_text().splitlines() if "threshold=0.9" in line]
    run, words = run_folder(tmp_path / "run", {}), ["mine", results, "--model", folder]
    capsys.readouterr()
    assert models.main(words) == 0
    assert "### Sudoku\n" in capsys.readouterr().out and not (tmp_path / "model" / "README.md").exists()
    assert models.main([*words, "--run", str(run), "--card", "--hardware", "an abacus"]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "an abacus" in card and 'dlm.load("mine")' in card and "fills 9×9 Sudoku grids" in card
    cells = {cell.strip() for cell in rows[0].split("|")} - {str(folder), "sudoku", "model", "task"}
    assert cells <= {cell.strip() for line in card.splitlines() if "threshold=0.9" in line for cell in line.split("|")}


def test_every_kind_of_model_has_its_words(models):
    words = {name: about("mine") for name, about in models.ABOUT.items()}
    assert (
        set(words) == {"sudoku", "code", "block", "causal", "draft"}
        and len({one.summary for one in words.values()}) == 5
    )
    assert models.kind_of(text_lm()) == "code" and models.kind_of(text_lm(attention="causal")) == "causal"


def test_bad_arguments(models, tmp_path, capsys):
    assert models.main(["sudoku", "x.json", "--model", str(tmp_path / "none")]) == 2
    assert "error: no model" in capsys.readouterr().err
    folder = saved(tmp_path / "model", "sudoku")
    results = measured(tmp_path, folder, "--config eval/sudoku-card --eval.limit 1")
    other = saved(tmp_path / "other", "sudoku", seed=1)
    assert models.main(["mine", results, "--model", other]) == 2
    assert "with other weights than" in capsys.readouterr().err
    (tmp_path / "no.json").write_text(json.dumps({}))
    assert models.main(["mine", str(tmp_path / "no.json"), "--model", folder]) == 2
    assert "holds no results of dlm-eval" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        models.main(["sudoku", "x.json", "--card"])
