"""Sections of a training config: what follows from what, and what is refused before anything is read."""

import pytest
import tomli

from dlm.config import check, load, to_toml
from dlm.errors import UserError
from dlm.training.config import TrainConfig


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (20, 2), (49, 4), (50, 50), (10_000, 50)])
def test_warm_up_follows_the_steps_unless_it_is_given(steps, warmup):
    assert check(TrainConfig, {"train": {"steps": steps}}, "test").train.warmup_steps == warmup
    assert check(TrainConfig, {"train": {"steps": steps, "warmup_steps": 1}}, "test").train.warmup_steps == 1


def test_a_given_warm_up_beyond_the_end_is_an_error():
    with pytest.raises(
        UserError, match=r"train\.warmup_steps = 50 exceeds train\.steps = 20: lower it, or leave it out"
    ):
        load(TrainConfig, overrides={"train.steps": "20", "train.warmup_steps": "50"})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"r": 4}, r'\[adapter\] r = 4, but adapter\.kind = "none" trains all weights: set adapter\.kind = "lora" or'),
        ({"r": 16}, r"r = 16, but adapter\.kind"),  # as by default, but written down
        ({"targets": ["q_proj"]}, r"targets = \['q_proj'\], but adapter\.kind"),
        ({"merge": True, "kind": "none"}, r"merge = True, but adapter\.kind"),
        (
            {"kind": "lora", "double_quant": False},
            r'adapter\.kind = "lora" does not read it: set adapter\.kind = "qlora"',
        ),
    ],
    ids=str,
)
def test_adapter_settings_that_no_kind_reads_are_errors(table, message):
    with pytest.raises(UserError, match=message):
        check(TrainConfig, {"adapter": table, "train": {"init_from": "pico"}}, "test")


def test_a_printed_config_is_read_again():
    for table in ({}, {"adapter": {"kind": "lora"}, "train": {"init_from": "pico", "steps": 20}}):
        config = check(TrainConfig, table, "test")
        assert check(TrainConfig, tomli.loads(to_toml(config)), "test") == config


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"data": {"source": "text", "paths": "a.txt"}}, "pico"),
        ({"data": {"source": "text", "paths": "a.txt"}, "train": {"tokenizer": "mine"}}, "mine"),
        ({"data": {"source": "text", "paths": "a.txt"}, "train": {"init_from": "sudoku"}}, None),
        ({"data": {"source": "sudoku"}}, None),
        ({}, None),
    ],
    ids=str,
)
def test_text_files_need_no_tokenizer_of_their_own(table, name):
    assert check(TrainConfig, table, "test").tokenizer == name
