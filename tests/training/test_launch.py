"""`dlm-train --launch` and the shipped files of accelerate: each one says what it is and can be read by accelerate."""

import os

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from dlm.cli import train
from dlm.config import SHIPPED
from dlm.training.launch import launch
from tests.refusals import refused

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
