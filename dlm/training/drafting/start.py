"""The draft that a run starts from, new or saved, and its frozen target."""

import torch

from dlm.errors import UserError
from dlm.models.draft import Draft
from dlm.models.draft_config import default_layer_ids
from dlm.models.draft_files import load_draft
from dlm.models.lm import LM
from dlm.models.loading import load
from dlm.training.config import TrainConfig
from dlm.training.drafting.vocabulary import frequent_tokens
from dlm.training.teacher import WEIGHTS


def new_draft(config: TrainConfig, device: torch.device) -> Draft:
    """The draft in fp32, on the device of its target, which is frozen and in train.precision's dtype."""
    d, t = config.draft, config.train
    assert d.target is not None
    target = load(d.target, dtype=WEIGHTS[t.precision], device=device)
    _require_target(target, config)
    target.network.requires_grad_(False)
    if t.init_from is not None:
        return load_draft(t.init_from, target, dtype="float32").train()
    layers, count = d.num_layers or 1, target.config.num_hidden_layers
    taps = d.target_layers or default_layer_ids(count, layers)
    if max(taps) >= count or min(taps) < 0 or len(set(taps)) < len(taps):
        raise UserError(
            f"draft.target = {d.target!r} has layers 0 to {count - 1}, and a draft would read {list(taps)}: "
            + ("change draft.target_layers" if d.target_layers else "set draft.target_layers")
        )
    try:
        draft = Draft.fresh(
            target,
            num_layers=layers,
            block_size=d.block_length or 8,
            target_layer_ids=taps,
            generator=torch.Generator(device=device).manual_seed(t.seed),
            tokens=frequent_tokens(config, target.tokenizer, target.config.vocab_size),
            **d.second,
        )
    except ValueError as error:  # of DraftConfig's own validators
        raise UserError(f"[draft] {_said(error)}") from error
    if not d.context:
        draft.fc.weight.data.zero_()
        draft.fc.weight.requires_grad_(False)
    return draft.float()


def _said(error: ValueError) -> str:
    from pydantic import ValidationError

    return error.errors()[0]["msg"].removeprefix("Value error, ") if isinstance(error, ValidationError) else str(error)


def _require_target(target: LM, config: TrainConfig) -> None:
    name, shape = config.draft.target, target.config
    if shape.attention != "causal":
        raise UserError(
            f"draft.target = {name!r} is {shape.attention}: a draft is for a causal model, whose tokens come one after the other"
        )
    if config.train.length > shape.max_position_embeddings:
        raise UserError(
            f"train.length = {config.train.length} exceeds the {shape.max_position_embeddings} positions of draft.target = {name!r}"
        )
    if config.train.length < 2:
        raise UserError(
            f"train.length = {config.train.length}: a draft learns from a token and those behind it: 2 at least"
        )
    if config.objective.documents == "apart" and target.eos_id is None:
        raise UserError(
            f"objective.documents = apart tells documents by end-of-text, and draft.target = {name!r} has none: leave it out"
        )
    if target.tokenizer is None and config.data.source not in ("sudoku", "tokens"):
        raise UserError(f"draft.target = {name!r} has no tokenizer.json, and text needs one: copy it into that folder")
