"""What a run starts from: new weights or a checkpoint, and the tokenizer that goes with the data. Knows no optimiser."""

import os
import shutil

import torch

from dlm.data.tokenizer import Tokenizer, load_tokenizer
from dlm.errors import UserError
from dlm.models.converting import convert
from dlm.models.device import require_room
from dlm.models.finding import find_tokenizer
from dlm.models.lm import LM
from dlm.models.loading import load
from dlm.models.transformer import Transformer
from dlm.training.config import TEXT_TOKENIZER, TrainConfig


def starting_point(config: TrainConfig) -> LM:
    """A model on the CPU, fp32 where it is trained, whose attention is the objective's, with the tokenizer its special tokens come from."""
    lm = _loaded(config) if config.train.init_from is not None else _new(config)
    objective, now = config.objective, lm.config
    if objective.masking == "causal":
        return convert(lm, "causal")
    if objective.masking == "block":
        return convert(lm, "block_causal", objective.block_length)
    return convert(lm, "bidirectional") if now.attention == "causal" else convert(lm, now.attention, now.block_length)


def _loaded(config: TrainConfig) -> LM:
    t = config.train
    assert t.init_from is not None
    frozen = config.adapter.kind != "none" and t.precision == "bf16"  # what is not trained needs no fp32
    lm = load(t.init_from, dtype="bfloat16" if frozen else "float32", device="cpu")
    if t.tokenizer is not None:
        lm.tokenizer = load_tokenizer(find_tokenizer(t.tokenizer))
    if lm.tokenizer is None and config.data.source != "sudoku":
        raise UserError(
            f"train.init_from = {t.init_from!r} has no tokenizer.json, and text needs one: copy it into that folder, "
            "or set train.tokenizer"
        )
    if t.length > lm.config.max_position_embeddings:
        raise UserError(
            f"train.length = {t.length} exceeds the {lm.config.max_position_embeddings} positions of train.init_from = {t.init_from!r}"
        )
    return lm


def _new(config: TrainConfig) -> LM:
    t = config.train
    tokenizer = _tokenizer(config)
    shape, size = config.model, tokenizer.vocab_size
    if 0 < shape.vocab_size < size:
        raise UserError(
            f"model.vocab_size = {shape.vocab_size} is smaller than the tokenizer's {size} tokens; 0 takes the tokenizer's"
        )
    special = {
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    known = {name: special[name] for name in special if getattr(shape, name) is None}
    shape = shape.model_validate({**shape.model_dump(), **known, "vocab_size": shape.vocab_size or size})
    with torch.device("meta"):
        require_room(Transformer(shape), torch.device("cpu"), "[model]", "make the network smaller")
    network = Transformer(shape)
    network.initialise(torch.Generator().manual_seed(t.seed))
    if network.config.mask_token_id is None:
        raise UserError(
            f"tokenizer {config.tokenizer!r} has no mask token: add one (dlm-tokenizer does), or set model.mask_token_id"
        )
    return LM(network, tokenizer, "new")


def _tokenizer(config: TrainConfig) -> Tokenizer:
    if config.tokenizer is not None:
        return load_tokenizer(find_tokenizer(config.tokenizer))
    if config.data.source == "sudoku":
        from dlm.sudoku.text import sudoku_tokenizer

        return Tokenizer(sudoku_tokenizer(), {"mask_token": "[MASK]", "eos_token": "[EOS]", "pad_token": "[EOS]"})
    raise UserError(
        f"train.tokenizer is not set: name a bundled model's ({TEXT_TOKENIZER}), a folder (dlm-tokenizer makes one) or a "
        "hub id, or set train.init_from"
    )


def check_compiler(device: torch.device) -> None:
    """torch.compile builds C++ on a CPU: say so before the first step rather than from the depths of it."""
    if device.type == "cpu" and not any(
        shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name
    ):
        raise UserError(
            "train.compile = true needs a C++ compiler on a CPU: apt install g++, or set train.compile = false"
        )
