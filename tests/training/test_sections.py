import os

import pytest
import tomli
from accelerate.commands.config.config_args import load_config_from_file

from dlm.cli import train
from dlm.config import SHIPPED, check, load, to_toml
from dlm.training.config import TrainConfig
from dlm.training.launch import launch
from tests.refusals import refused


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (20, 2), (49, 4), (50, 50), (10_000, 50)])
def test_warm_up_follows_the_steps_unless_it_is_given(steps, warmup):
    assert check(TrainConfig, {"train": {"steps": steps}}, "test").train.warmup_steps == warmup
    assert check(TrainConfig, {"train": {"steps": steps, "warmup_steps": 1}}, "test").train.warmup_steps == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"r": 16}, "r = 16 is only read"),  # as by default, but written down
        ({"targets": ["q_proj"]}, r'targets = \["q_proj"\] is only read'),
        ({"merge": True, "kind": "none"}, "merge = true is only read"),
    ],
    ids=str,
)
def test_adapter_settings_that_no_kind_reads_are_errors(table, message):
    refused(message, check, TrainConfig, {"adapter": table, "train": {"init_from": "pico"}}, "test")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"optim": {"momentum": 0.9}}, 'momentum = 0.9 is only read with hidden.algorithm = "muon", and .* "adamw"'),
        ({"optim": {"ns_steps": 5}}, "ns_steps = 5 is only read"),
        ({"profile": {"wait": 3}}, "wait = 3 is only read with trace, memory or DLM_PROFILE, and trace = false"),
        ({"watch": {"pictures": False}}, "pictures = false is only read with an every above 0, and every = 0"),
        ({"eval": {"gen_length": 8}}, "gen_length = 8 is only read with a sample_every above 0"),
    ],
    ids=str,
)
def test_settings_that_nothing_reads_are_errors(table, message, tmp_path):
    refused(message, check, TrainConfig, table, "test")
    (tmp_path / "muon.toml").write_text('[optim]\nmomentum = 0.9\nhidden = { algorithm = "muon" }\n')
    assert load(TrainConfig, [tmp_path / "muon.toml"], {"optim.hidden.algorithm": "adamw"}).optim.momentum == 0.9


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


FILES = sorted((SHIPPED / "accelerate").glob("*.yaml"))


def test_all_ways_are_shipped():
    assert [path.stem for path in FILES] == ["cpu-2", "ddp", "deepspeed-zero2", "deepspeed-zero3", "fsdp2"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_is_read_by_accelerate_and_leaves_precision_to_the_run(path):
    found = load_config_from_file(str(path))
    assert found.mixed_precision == "no" and found.same_network and found.num_machines == 1
    assert found.num_processes == (2 if path.stem == "cpu-2" else -1)
    assert path.read_text().startswith("# ") and f"configs/accelerate/{path.name}" in path.read_text()


def test_launch_hands_over_to_accelerate_with_the_same_options(monkeypatch):
    handed = []
    monkeypatch.setattr(os, "execv", lambda program, words: handed.extend(words))
    assert train.main(["--launch", "cpu-2", "--config", "pico", "--train.lr", "3e-4", "--train.compile"]) == 0
    kind = str(SHIPPED / "accelerate" / "cpu-2.yaml")
    assert handed[1:5] == ["-m", "accelerate.commands.launch", "--config_file", kind]
    assert handed[5:] == ["-m", "dlm.cli.train", "--config", "pico", "--train.lr=3e-4", "--train.compile=true"]


def test_launch_says_what_there_is(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    refused(r'did you mean "fsdp2"\? \(shipped: cpu-2, ddp', launch, "fsdp", [])
    refused("a process for each GPU, and there is none; cpu-2 needs none", launch, "ddp", [])
