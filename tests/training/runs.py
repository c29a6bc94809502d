"""A training run small enough for a test: a tokenizer and a corpus of its own, a two-layer network."""

import json
from pathlib import Path

from dlm.config import load
from dlm.data import TokenizerConfig, train_tokenizer
from dlm.data.config import DataConfig
from dlm.training.config import TrainConfig

TEXTS = [f"def function_{i}(x):\n    return x * {i} + {i % 7}\n" for i in range(120)]

SHAPE = {"model.hidden_size": "16", "model.num_hidden_layers": "2", "model.num_attention_heads": "2"}
SHAPE |= {"model.num_key_value_heads": "2", "model.head_dim": "8", "model.intermediate_size": "24"}


def corpus(folder: Path) -> dict[str, str]:
    """A JSONL corpus and its tokenizer in `folder`, as overrides of a training config."""
    data = folder / "corpus.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        source = DataConfig(source="jsonl", paths=(str(data),))
        train_tokenizer(TokenizerConfig(output=str(folder / "tokenizer"), vocab_size=300, data=source))
    source = {"data.source": "jsonl", "data.paths": json.dumps([str(data)]), "data.heldout_fraction": "0.1"}
    return {**source, "train.tokenizer": str(folder / "tokenizer")}


def config(folder: Path, out: str = "run", **overrides: str) -> TrainConfig:
    """A config of a few seconds; `overrides` use __ for dots."""
    small = {**corpus(folder), "train.out": str(folder / out), "train.steps": "8", "train.batch_size": "4"}
    small |= {"train.length": "16", "train.warmup_steps": "2", "train.device": "cpu"}
    small |= {} if "trainable__kind" in overrides or overrides.get("train__init_from", "none") != "none" else SHAPE
    small |= {"optim.hidden.algorithm": "muon", "eval.sequences": "4", "eval.draws": "1", "log.every": "1"}
    small |= {"log.progress": "false", "checkpoint.every": "0"}
    return load(TrainConfig, [], small | {key.replace("__", "."): value for key, value in overrides.items()})


def aligned(base: Path, out: str, **overrides: str) -> TrainConfig:
    """A config whose run starts from the causal model in `base`/ar and is aligned to it."""
    options = {"train__init_from": str(base / "ar"), "align__weight": "2.0", "eval__sequences": "0"}
    return config(base, out, **(options | overrides))


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl as dicts."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
