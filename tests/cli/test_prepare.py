"""`dlm-prepare`: its subcommands, and what it says to a word that is none of them."""

import pytest

from dlm.cli.prepare import SUBCOMMANDS, main


@pytest.mark.parametrize("argv", [[], ["--help"]], ids=str)
def test_the_overview_names_every_subcommand(argv, capsys):
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}: " in shown for name in SUBCOMMANDS)


def test_an_unknown_subcommand_names_the_nearest(capsys):
    assert main(["anchor"]) == 2
    assert 'no such subcommand: "anchor"; did you mean "anchors"?' in capsys.readouterr().err


def test_anchors_reads_a_training_config(capsys):
    assert main(["anchors", "--help"]) == 0 and "--align.anchors" in capsys.readouterr().out
    assert main(["anchors", "--align.layers", "[1, 2]", "--print-config"]) == 0
    assert 'anchors_dtype = "bfloat16"' in capsys.readouterr().out
    assert main(["anchors"]) == 2 and "align.anchors is not set" in capsys.readouterr().err


def test_trajectories_reads_a_config_of_its_own(capsys):
    assert main(["trajectories", "--help"]) == 0 and "--trajectories.responses" in capsys.readouterr().out
    assert main(["trajectories", "--config", "prepare-trajectories", "--print-config"]) == 0
    assert 'responses = "forced"' in capsys.readouterr().out
    assert main(["trajectories", "--trajectories.sample", "3"]) == 2
    assert 'did you mean "--trajectories.samples"?' in capsys.readouterr().err
