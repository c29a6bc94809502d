"""train.precision: products of halves learn what fp32 learns, resume exactly, and are refused where there are none."""

from pathlib import Path

import pytest

from dlm.config import load
from dlm.errors import UserError
from dlm.kernels.c.trained import no_halves
from dlm.training import processes
from dlm.training.config import TrainConfig
from dlm.training.loop import train

from .runs import config

halves = pytest.mark.skipif(no_halves() is not None, reason="this processor does not multiply halves")


@halves
def test_halves_learn_what_fp32_learns_and_resume_bitwise(tmp_path: Path):
    exact = train(config(tmp_path, "fp32")).losses
    whole = train(config(tmp_path, "fp16", train__precision="fp16")).losses
    assert whole == pytest.approx(exact, rel=5e-3) and whole != exact
    given = {"train__precision": "fp16", "train__schedule": "constant", "checkpoint__every": "1"}
    straight = train(config(tmp_path, "straight", **given)).losses
    first = train(config(tmp_path, "parts", **given, train__steps="3")).losses
    assert first + train(config(tmp_path, "parts", **given)).losses == straight


def test_halves_are_refused_where_nothing_multiplies_them(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(processes, "no_halves", lambda: "this processor is an old one")
    with pytest.raises(UserError, match='precision = "fp16" is for a CPU .*: this processor is an old one'):
        train(config(tmp_path, train__precision="fp16"))


def test_halves_and_the_compiler_exclude_each_other():
    with pytest.raises(UserError, match="leave one of them out"):
        load(TrainConfig, [], {"train.precision": "fp16", "train.compile": "true"})
