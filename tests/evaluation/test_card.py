import json
from pathlib import Path
from typing import Any

import pytest
import tomli

from dlm import config
from dlm.evaluation.card import About, Run, Table, changed, machine, render_card
from dlm.evaluation.rate import Rate
from dlm.evaluation.table import markdown
from dlm.training.config import TrainConfig
from tests.refusals import refused

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
    given = {"about": about, "tables": [table], "facts": {"parameters": "1,292,800"}, "hardware": "two cores"}
    given |= changes
    return render_card("sudoku", run=run, **given)


def toml_of(text: str) -> dict[str, Any]:
    return tomli.loads(text.split("```toml\n")[1].split("```")[0])


def test_the_card_says_what_is_recommended(tmp_path: Path) -> None:
    run = Run.read(run_folder(tmp_path / "run", {}))
    text = card(run, recommended={"generate": {"temperature": 1.0, "rule": "random"}, "infill": {}})
    assert '- `dlm.generate`: `temperature = 1.0`, `rule = "random"`' in text and "- `dlm.infill`" not in text
    assert "Where a call names no settings" not in card(run) + card(run, recommended={"generate": {}})


def test_the_card_says_what_the_run_was(tmp_path):
    text = card(Run.read(run_folder(tmp_path / "run", {})))
    header, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert header.splitlines()[0] == "license: apache-2.0"
    for part in ("51,840", "1 h 2 min", "1,292,800", "two cores", "0.5000 ± 0.0100", "97.3 %"):
        assert part in body
    assert "dlm-train --config sudoku\n" in body
    assert str(tmp_path) not in text
    assert toml_of(text)["model"]["position_embedding"] == "learned"
    assert "out" not in toml_of(text)["train"]


def test_what_a_run_changed_of_the_shipped_config_is_on_its_command_line(tmp_path):
    text = card(Run.read(run_folder(tmp_path / "run", {"train.lr": "0.5", "train.ema": "0.9"})))
    [command] = [line for line in text.splitlines() if line.startswith("dlm-train")]
    words = command.removeprefix("dlm-train --config sudoku ").split()
    assert words == ["--train.lr", "0.5", "--train.ema", "0.9"]
    loaded = config.load(TrainConfig, ["sudoku"], {"train.lr": words[1], "train.ema": words[3]})
    again = tmp_path / "again.toml"
    again.write_text(text.split("```toml\n")[1].split("```")[0])
    assert changed(loaded.model_dump(mode="json")) == changed(config.load(TrainConfig, [again]).model_dump(mode="json"))


def test_another_config_than_the_shipped_one_is_given_whole(tmp_path):
    text = card(Run.read(run_folder(tmp_path / "run", {"train.lr": "0.001", "train.ema": "0.9"})))  # the usual rate
    assert "Save the config below" in text
    assert "dlm-train --config sudoku.toml\n" in text
    again = tmp_path / "again.toml"
    again.write_text(text.split("```toml\n")[1].split("```")[0])
    loaded = config.load(TrainConfig, [again])
    assert (loaded.train.ema, loaded.model.hidden_size, loaded.data.source) == (0.9, 128, "sudoku")


def test_the_commands_before_and_a_config_of_another_name(tmp_path):
    run = Run.read(run_folder(tmp_path / "run", {}))
    about = About(summary="S.", use="U.", data="D.", limits="L.", config="sudoku", before=("dlm-prepare x",))
    text = render_card("mine", run=run, about=about, tables=[], facts={}, hardware="two cores")
    assert "```bash\ndlm-prepare x\ndlm-train --config sudoku\n```" in text


def test_folders_that_are_no_runs(tmp_path):
    refused(r"no metrics\.jsonl", Run.read, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    refused("no training step yet", Run.read, tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROWS[0]))
    refused("has no checkpoint", Run.read, tmp_path)


def test_the_machine_is_named_with_its_versions():
    assert "torch" in machine() and "logical cores" in machine()


def test_a_validation_of_one_draw_has_no_error(tmp_path):
    folder = run_folder(tmp_path, {})
    rows = [{**row, "bound_error": None} if "bound" in row else row for row in ROWS]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "0.5000 (one draw: no error) nats a token (bound)" in card(Run.read(folder))


def test_columns_follow_the_headings():
    rows = [{"rule": "margin", "n": 1000, "tpf": 1.5, "extra": 3}, {"rule": "a|b", "n": None}]
    lines = markdown(rows, {"n": "puzzles", "rule": "rule", "tpf": "TPF"}).splitlines()
    assert lines[0] == "| puzzles | rule   |  TPF |"
    assert lines[1] == "| ------: | ------ | ---: |"
    assert lines[2] == "|   1,000 | margin | 1.50 |"
    assert lines[3] == "|       – | a\\|b   |    – |"


def test_first_row_names_the_columns_by_itself():
    assert markdown([{"a": 1}]).splitlines()[0] == "| a |"
    assert markdown([]) == "*nothing measured*"


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [  # Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_intervals_are_the_published_ones(hits, total, low, high):
    assert Rate(hits, total).interval == pytest.approx((low, high), abs=6e-5)


def test_ends_are_exact_and_nothing_is_unknown():
    assert Rate(0, 7).interval[0] == 0.0
    assert Rate(7, 7).interval[1] == 1.0
    nothing = Rate.of([])
    assert (nothing.value, nothing.interval, str(nothing)) == (None, (0.0, 1.0), "–")


def test_counts_and_text():
    rate = Rate.of([True, False, True, True])
    assert rate == Rate(3, 4)
    assert str(rate) == "75.0 % (30.1–95.4)"
    assert rate.to_dict() == {"hits": 3, "total": 4, "rate": 0.75, "low": rate.interval[0], "high": rate.interval[1]}
