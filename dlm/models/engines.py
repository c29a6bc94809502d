"""Other programs that serve block-diffusion checkpoints, and what each reads of a folder and cannot be told. Runs none of them.

Read from the sources of the versions named here; `python -m tests.models.engines` compares these tables with a release's own code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm.errors import UserError
from dlm.models.portable import hub_code, local_code
from dlm.models.settings import read_json

DENSE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)
MIXED = (
    *DENSE,
    "first_k_dense_replace",
    "head_dim",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "partial_rotary_factor",
    "use_bias",
    "use_qkv_bias",
)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What an engine takes for granted of one architecture."""

    mask_token_id: int
    block_length: int | None = None
    """None: it is told at the start."""
    keys: tuple[str, ...]
    """Keys of config.json that it reads without a default."""


@dataclass(frozen=True, kw_only=True)
class OtherEngine:
    """One such program. `start` is how it serves a FOLDER, with BLOCK for its block length."""

    version: str
    start: str
    architectures: Mapping[str, Served] = field(default_factory=dict)


ENGINES = {
    "sglang": OtherEngine(
        version="0.5.23",
        start="python -m sglang.launch_server --model-path FOLDER --trust-remote-code --dllm-algorithm LowConfidence",
        architectures={
            "SDARForCausalLM": Served(mask_token_id=151669, block_length=4, keys=DENSE),
            "LLaDA2MoeModelLM": Served(mask_token_id=156895, block_length=32, keys=MIXED),
        },
    ),
    "lmdeploy": OtherEngine(
        version="0.18.0",
        start="lmdeploy serve api_server FOLDER --backend pytorch --trust-remote-code --dllm-block-length BLOCK",
        architectures={"SDARForCausalLM": Served(mask_token_id=151669, keys=(*DENSE, "attention_bias"))},
    ),
}


def require_served(folder: Path, name: str) -> str:
    """How that engine serves this folder. Raises UserError where it would refuse the folder, or decode it wrongly."""
    if name not in ENGINES:
        raise UserError(f"engine = {name!r} is not known; known: {', '.join(ENGINES)}")
    engine, hub = ENGINES[name], read_json(folder / "config.json")
    who, block = f"{name} {engine.version}", hub.get("block_size")
    stated = str(next(iter(hub.get("architectures") or ()), None))
    served = engine.architectures.get(stated)
    if served is None:
        known = ", ".join(engine.architectures)
        raise UserError(
            f"{who} serves no {stated} (family {hub.get('model_type')}) by diffusion, only {known}: serve it with dlm-serve"
        )
    if hub.get("mask_token_id", served.mask_token_id) != served.mask_token_id:
        raise UserError(
            f"{who} takes {served.mask_token_id} for the mask of {stated}, and here it is {hub['mask_token_id']}: "
            "serve it with dlm-serve"
        )
    if served.block_length is not None and block not in (None, served.block_length):
        raise UserError(
            f"{who} decodes {stated} in blocks of {served.block_length}, and this model was trained on {block}: give it a "
            f"--dllm-algorithm-config file that says block_size: {block}, and export without --for"
        )
    if missing := [key for key in served.keys if key not in hub]:
        raise UserError(f"{who} needs {', '.join(missing)} in config.json, which has none: write them there")
    _require_configuration(hub, folder, who)
    return engine.start.replace("FOLDER", str(folder)).replace("BLOCK", str(block or 4))


def _require_configuration(hub: Mapping[str, Any], folder: Path, who: str) -> None:
    """These engines read config.json by a class that transformers does not have: the checkpoint's own."""
    auto_map = hub.get("auto_map")
    stated = isinstance(auto_map, Mapping) and "AutoConfig" in auto_map
    if not stated or not (local_code(auto_map, folder) or "AutoConfig" in hub_code(auto_map)):
        raise UserError(
            f"{who} reads config.json by the family's own configuration class, and this folder has none: copy the published "
            f"checkpoint's configuration_*.py and its auto_map beside the model that is exported"
        )
