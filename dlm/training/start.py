"""The model that a run starts from, new or saved, with the tokenizer for its data."""

import torch

from dlm.data.tokenizer import Tokenizer, load_tokenizer
from dlm.errors import UserError
from dlm.inference.recommended import KEY as RECOMMENDED
from dlm.models.converting import convert
from dlm.models.device import bytes_of, require_room
from dlm.models.finding import find_tokenizer
from dlm.models.lm import LM
from dlm.models.loading import load
from dlm.models.transformer import Transformer
from dlm.training.config import TEXT_TOKENIZER, TrainConfig
from dlm.training.masking import MASKINGS


def starting_point(config: TrainConfig) -> LM:
    """The model on the CPU with its tokenizer, trained weights in fp32, and the attention that the masking trains."""
    lm = _loaded(config) if config.train.init_from is not None else _new(config)
    trained, now = MASKINGS[config.objective.masking].attention, lm.config
    if trained is not None:
        return convert(lm, trained, config.objective.block_length if trained == "block_causal" else None)
    if now.attention == "causal" or config.objective.attention == "bidirectional":
        return convert(lm, "bidirectional")
    return convert(lm, now.attention, now.block_length)


def _loaded(config: TrainConfig) -> LM:
    t = config.train
    assert t.init_from is not None
    frozen = config.adapter.kind != "none" and t.precision == "bf16"  # what is not trained needs no fp32
    lm = load(t.init_from, dtype="bfloat16" if frozen else "float32", device="cpu")
    lm.generation = {key: value for key, value in lm.generation.items() if key != RECOMMENDED}  # of the old weights
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
    tokenizer = tokenizer_of(config)
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
        require_room(bytes_of(Transformer(shape)), torch.device("cpu"), "[model]", "make the network smaller")
    network = Transformer(shape)
    network.initialise(torch.Generator().manual_seed(t.seed))
    if network.config.mask_token_id is None:
        raise UserError(
            f"tokenizer {config.tokenizer!r} has no mask token: add one (dlm-tokenizer does), or set model.mask_token_id"
        )
    return LM(network, tokenizer, "new")


def tokenizer_of(config: TrainConfig) -> Tokenizer:
    """The tokenizer of a new model: the one that is named, or the data's own."""
    if config.tokenizer is not None:
        return load_tokenizer(find_tokenizer(config.tokenizer))
    if config.data.source == "sudoku":
        from dlm.sudoku.text import sudoku_tokenizer

        return Tokenizer(sudoku_tokenizer(), {"mask_token": "[MASK]", "eos_token": "[EOS]", "pad_token": "[EOS]"})
    raise UserError(
        f"train.tokenizer is not set: name a bundled model's ({TEXT_TOKENIZER}), a folder (dlm-tokenizer makes one) or a "
        "hub id, or set train.init_from"
    )
