import json
from pathlib import Path
from typing import Any

import pytest
import tomli

from dlm import config
from dlm.errors import UserError
from dlm.evaluation.about import ABOUT
from dlm.evaluation.card import About, Run, Table, machine, render_card
from dlm.training.config import TrainConfig

ROWS = [
    {"step": 10, "loss": 2.0, "tokens": 25_920, "seconds": 8.0},
    {"step": 20, "tokens": 51_840, "bound": 0.5, "bound_error": 0.01},
    {"step": 20, "loss": 1.0, "tokens": 51_840, "seconds": 3725.2},
]


def run_folder(folder: Path, overrides: dict[str, str]) -> Path:
    """What a training leaves, as far as the card reads it."""
    chosen = config.load(TrainConfig, ["sudoku"], {"train.out": str(folder), **overrides})
    checkpoint = folder / "checkpoints" / "step-00000020"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(chosen.model_dump(mode="json")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def card(run: Run, **changes: Any) -> str:
    about = About(summary="S.", use="U.", data="D.", limits="L.", tags=("sudoku",))
    table = Table(title="T", text="X.", headings={"a": "A"}, rows=[{"a": "97.3 %"}])
    given = {
        "about": about,
        "tables": [table],
        "facts": {"parameters": "1,292,800"},
        "hardware": "two cores",
        **changes,
    }
    return render_card("sudoku", run=run, **given)


def toml_of(text: str) -> dict[str, Any]:
    return tomli.loads(text.split("```toml\n")[1].split("```")[0])


def test_the_card_says_what_is_recommended(tmp_path: Path) -> None:
    run = Run.read(run_folder(tmp_path / "run", {}))
    text = card(run, recommended={"generate": {"temperature": 1.0, "rule": "random"}, "infill": {}})
    assert '- `dlm.generate`: `temperature = 1.0`, `rule = "random"`' in text and "- `dlm.infill`" not in text
    assert "Where a call names no settings" not in card(run) + card(run, recommended={"generate": {}})


def test_the_card_says_what_the_run_was(tmp_path: Path) -> None:
    text = card(Run.read(run_folder(tmp_path / "run", {})))
    header, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert header.splitlines()[0] == "license: apache-2.0"
    for part in (
        "51,840",
        "1 h 2 min",
        "1,292,800",
        "two cores",
        "0.5000 ± 0.0100",
        "97.3 %",
        "dlm-train --config sudoku\n",
    ):
        assert part in body
    assert str(tmp_path) not in text
    assert toml_of(text)["model"]["position_embedding"] == "learned"
    assert "out" not in toml_of(text)["train"]


def test_another_config_than_the_shipped_one_is_given_whole(tmp_path: Path) -> None:
    text = card(Run.read(run_folder(tmp_path / "run", {"train.lr": "0.5", "train.save_dtype": "float16"})))
    assert "Save the config below" in text
    assert "dlm-train --config sudoku.toml\n" in text
    again = tmp_path / "again.toml"
    again.write_text(text.split("```toml\n")[1].split("```")[0])
    loaded = config.load(TrainConfig, [again])
    assert (loaded.train.lr, loaded.model.hidden_size, loaded.data.source) == (0.5, 128, "sudoku")


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        Run.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no training step yet"):
        Run.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROWS[0]))
    with pytest.raises(UserError, match="has no checkpoint"):
        Run.read(tmp_path)


def test_words_for_both_kinds() -> None:
    assert set(ABOUT) == {"sudoku", "code"}
    assert 'dlm.load("mine")' in ABOUT["sudoku"]("mine").use
    assert "torch" in machine()


def test_a_validation_of_one_draw_has_no_error(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, {})
    rows = [{**row, "bound_error": None} if "bound" in row else row for row in ROWS]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "0.5000 (one draw: no error) nats a token (bound)" in card(Run.read(folder))
