"""`dlm.load_draft`: a draft from a folder as z-lab, SpecForge and speculators write it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm.errors import UserError
from dlm.models.device import DTYPES
from dlm.models.draft import Draft
from dlm.models.draft_config import DraftConfig
from dlm.models.draft_hub import draft_config_from_hub
from dlm.models.draft_saving import OWN, TOKENS, draft_layout
from dlm.models.finding import find
from dlm.models.lm import LM
from dlm.models.required import require_lm
from dlm.models.settings import read_json
from dlm.models.shards import KINDS, Declared, declared, opened, weight_files

OF_THE_TARGET = ("embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.", "t2d", "d2t")
"""Tensors that speculators' folders repeat of the target, or that say which tokens it has."""


def load_draft(
    name: str | Path, target: LM, *, dtype: str | torch.dtype = "auto", revision: str | None = None
) -> Draft:
    """A DFlash draft by bundled name, folder or hub id, for this target, on its device.

    Reads what z-lab, SpecForge and speculators write, DFlash 2 too. `dtype="auto"` is the target's. The target must be
    causal, with the width, depth and vocabulary that the draft was made for. Raises UserError naming both models.
    """
    require_lm(target, "load_draft()")
    folder = find(name, revision)
    hub = read_json(folder / "config.json")
    if not hub:
        raise UserError(f"{folder} has no config.json, so it is not a draft")
    tokenizer = target.tokenizer
    masks = (target.mask_id, None if tokenizer is None else tokenizer.mask_token_id)
    config = draft_config_from_hub(hub, str(folder / "config.json"), next((m for m in masks if m is not None), None))
    require_fit(config, str(name), target)
    _require_tokenizer(hub, folder, str(name), target)
    kind = target.dtype if dtype == "auto" else DTYPES.get(str(dtype).removeprefix("torch."))
    if kind is None:
        raise UserError(f"dtype={str(dtype)!r} is not known; use auto, {', '.join(DTYPES)}")
    return _read(config, folder, target, str(name), kind)


def require_fit(config: DraftConfig, name: str, target: LM) -> None:
    """Raises UserError where the draft is not one for this target, or the target none that drafts can be checked by."""
    shape = target.config
    both = f"draft {name!r} does not fit model {target.name!r}"
    if shape.attention != "causal":
        raise UserError(
            f"{both}: a DFlash draft needs a causal target, and {shape.model_type} is {shape.attention}: its tokens are not "
            'written one after the other; for such models see draft="self"'
        )
    for what, own, others in (
        ("width (hidden_size)", config.network.hidden_size, shape.hidden_size),
        ("depth (num_target_layers)", config.num_target_layers, shape.num_hidden_layers),
        ("vocabulary (vocab_size)", config.network.vocab_size, shape.vocab_size),
    ):
        silent = what.startswith("depth") and own < others and own == max(config.target_layer_ids) + 1
        if own != others and not silent:  # speculators' files do not say the target's depth
            raise UserError(f"{both}: it was made for a {what} of {own:,}, and the model's is {others:,}")
    if config.mask_token_id >= shape.vocab_size:
        raise UserError(f"{both}: mask_token_id = {config.mask_token_id} lies outside its {shape.vocab_size:,} tokens")


def _require_tokenizer(hub: dict[str, Any], folder: Path, name: str, target: LM) -> None:
    """Raises UserError where the folder says which tokenizer its ids are of, and the target has another one."""
    from dlm.data.tokenizer import has_vocabulary, load_tokenizer

    own = hub.get(OWN)
    stated = own.get("tokenizer") if isinstance(own, dict) else None
    if stated is None and has_vocabulary(folder):
        stated = load_tokenizer(folder).fingerprint
    found = None if target.tokenizer is None else target.tokenizer.fingerprint
    if stated is not None and found is not None and stated != found:
        made = own.get("target") if isinstance(own, dict) else None
        raise UserError(
            f"draft {name!r} does not fit model {target.name!r}: it was made for another tokenizer"
            f"{f' (that of {made!r})' if made else ''}, so its token ids mean other text"
        )


def _read(config: DraftConfig, folder: Path, target: LM, name: str, dtype: torch.dtype) -> Draft:
    files = weight_files(folder)
    found = declared(files)
    if config.network.num_hidden_layers > len(found):
        raise UserError(
            f"{folder} holds {len(found)} tensors: too few for its {config.network.num_hidden_layers} layers"
        )
    with torch.device("meta"):
        draft = Draft(config, target, name)
    draft.to(dtype)
    layout = draft_layout(draft)
    spelled = {hub: _spelled(hub, found) for hub in layout}
    for hub, tensor in layout.items():
        there = found.get(spelled[hub])
        if there is None:
            raise UserError(
                f"{folder} lacks the tensor {hub!r} of shape {tensor.shape}, which a draft of this config has"
            )
        if there.shape != tensor.shape:
            raise UserError(
                f"{there.file}: tensor {hub!r} has shape {there.shape}; config.json asks for {tensor.shape}"
            )
        if there.kind not in KINDS:
            raise UserError(
                f"{there.file}: tensor {hub!r} is stored as {there.kind}; weights are read from {', '.join(KINDS)}"
            )
    unknown = [hub for hub in found if hub not in spelled.values() and not hub.startswith(OF_THE_TARGET)]
    if unknown:
        raise UserError(f"{found[unknown[0]].file} has a tensor {unknown[0]!r} that a draft of this config has not")
    draft.to_empty(device=target.device)
    count, listed = config.draft_vocab_size, found.get(TOKENS)
    if count is not None:
        draft.tokens = _tokens(listed, count, target)
        _require_target_s_head(draft, found.get("lm_head.weight"))
    elif listed is not None and listed.shape != (target.config.vocab_size,):
        raise UserError(
            f"{listed.file} lists {listed.shape} tokens in {TOKENS!r}, and config.json has no draft_vocab_size"
        )
    ours = draft.state_dict()
    names = {spelled[hub]: hub for hub in layout}
    with torch.no_grad():
        for file in files:
            with opened(file, target.device) as shard:
                for hub in shard.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                    if hub in names:
                        (part,) = layout[names[hub]].parts
                        ours[part.ours].copy_(shard.get_tensor(hub))
    return draft.eval()


def _tokens(declared: Declared | None, count: int, target: LM) -> Tensor:
    """The tokens it can draft, ascending."""
    if declared is None:
        raise UserError(f"draft_vocab_size = {count:,}, but no file has the tensor {TOKENS!r}, which says which tokens")
    where = f"{declared.file}: tensor {TOKENS!r}"
    if declared.shape != (count,) or declared.kind != "I64":
        raise UserError(
            f"{where} is {declared.kind} of shape {declared.shape}; draft_vocab_size asks for I64, ({count},)"
        )
    with opened(declared.file, torch.device("cpu")) as shard:
        tokens = shard.get_tensor(TOKENS) + torch.arange(count)
    if tokens[0] < 0 or tokens[-1] >= target.config.vocab_size or bool((tokens.diff() <= 0).any()):
        raise UserError(f"{where} should give ascending tokens of the {target.config.vocab_size:,} that the target has")
    return tokens.to(target.device)


def _require_target_s_head(draft: Draft, declared: Declared | None) -> None:
    """Raises UserError where the folder has a head that is not the target's: the draft computes with the target's."""
    if declared is not None:
        with opened(declared.file, draft.target.device) as shard:
            head = shard.get_tensor("lm_head.weight")
        ours = draft.head_weight().to(head.dtype)
        if head.shape != ours.shape or not torch.equal(head, ours):
            raise UserError(
                f"{declared.file}: tensor 'lm_head.weight' is not these tokens' rows of {draft.target.name!r}'s head: a draft "
                "with a head of its own is not read"
            )


def _spelled(hub: str, found: Any) -> str:
    """The tensor's name in these files: code may store the selector's codebooks as embeddings."""
    return f"{hub}.weight" if hub not in found and f"{hub}.weight" in found else hub
