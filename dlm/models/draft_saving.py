"""Writes a draft's folder in z-lab's format, whole or not at all; and says which tensor there is which of ours."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from dlm.errors import UserError
from dlm.models.device import DTYPES
from dlm.models.draft_hub import draft_config_to_hub
from dlm.models.folder import replacing
from dlm.models.hub_tensors import HubTensor, Names, hub_layout
from dlm.models.shards import WEIGHTS
from dlm.models.weights import gather

if TYPE_CHECKING:
    from dlm.models.draft import Draft

NAMES: Names = {
    "fc": "fc",
    "hidden_norm": "hidden_norm",
    "norm": "norm",
    "layers.*": "layers.*",
    "layers.*.attn_norm": "layers.*.input_layernorm",
    "layers.*.attn": "layers.*.self_attn",
    "layers.*.mlp_norm": "layers.*.post_attention_layernorm",
    "candidate_selector": "candidate_selector",
}
TOKENS = "d2t"
"""speculators' name for which tokens a draft can draft: to each one's number among them, what its id is greater by."""
OWN = "dlm"
"""Key of config.json for what z-lab's format has no room for: whose draft it is."""


def save_draft(draft: "Draft", folder: str | Path, *, dtype: str | None = None, overwrite: bool = False) -> None:
    """Write config.json and model.safetensors as z-lab has them: neither embedding nor head.

    Raises UserError for a folder that cannot be written, and for what that format cannot say.
    """
    folder = Path(folder)
    kind = next(draft.parameters()).dtype if dtype is None else DTYPES.get(dtype)
    if kind is None:
        raise UserError(f"dtype={dtype!r} is not known; use {', '.join(DTYPES)}")
    target = draft.target
    own = {"target": target.name}
    if target.tokenizer is not None:
        own["tokenizer"] = target.tokenizer.fingerprint
    hub = {**draft_config_to_hub(draft.config), "torch_dtype": str(kind).removeprefix("torch."), OWN: own}
    layout, ours = draft_layout(draft), draft.state_dict()
    tensors: dict[str, Tensor] = {name: gather(tensor, ours, kind) for name, tensor in layout.items()}
    if draft.tokens is not None:
        tensors[TOKENS] = (draft.tokens - torch.arange(len(draft.tokens), device=draft.tokens.device)).cpu()
    with replacing(folder, overwrite) as work:
        (work / "config.json").write_text(json.dumps(hub, indent=2, ensure_ascii=False) + "\n", "utf-8")
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})


def draft_layout(draft: "Draft") -> dict[str, HubTensor]:
    """The tensors of a draft's folder, by their names there."""
    return hub_layout(NAMES, {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()})
