"""Reads adapter_config.json, which anyone may have written: only the settings of LoRA that change what is computed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from dlm import config
from dlm.errors import UserError
from dlm.models.settings import read_json
from dlm.models.shards import KINDS, declared

Name = Annotated[str, Field(pattern=r"^[\w.]+$")]
"""A plain name; peft would read anything else as a regular expression, which may run forever."""
Names = Literal["all-linear"] | list[Name]
Rank = Annotated[int, Field(gt=0, lt=2**20)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
IGNORED = (
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode"),
    *("auto_mapping", "init_lora_weights", "megatron_core", "qalora_group_size", "loftq_config"),
)
"""Settings that do not change a trained adapter."""


class LoraSettings(BaseModel, extra="forbid"):
    """The settings that are read, under peft's names."""

    r: Rank
    target_modules: Names
    lora_alpha: Number = 8
    lora_dropout: Number = Field(default=0, le=1)
    exclude_modules: Names = []
    rank_pattern: dict[Name, Rank] = {}
    alpha_pattern: dict[Name, Number] = {}
    layers_to_transform: list[int] = []
    layers_pattern: Name | list[Name] = []
    use_rslora: bool = False
    use_dora: bool = False


def lora_settings(folder: Path, file: str) -> dict[str, Any]:
    """The arguments of peft's `LoraConfig` as `folder`/`file` states them."""
    stated = read_json(folder / file).items()
    table = {key: value for key, value in stated if key not in IGNORED and value is not None and value is not False}
    table = {key: value for key, value in table.items() if value not in ({}, [], "none")}
    return config.check(LoraSettings, table, str(folder / file)).model_dump(exclude_unset=True)


def check_weights(settings: Mapping[str, Any], folder: Path, file: str) -> None:
    """Raise UserError unless the weights are floating-point and of the rank that the settings say."""
    weights = declared([folder / file])
    for name, tensor in weights.items():
        if tensor.kind not in KINDS:
            raise UserError(f"{tensor.file}: tensor {name!r} is stored as {tensor.kind}; use {', '.join(KINDS)}")
    ranks = {tensor.shape[0] for name, tensor in weights.items() if ".lora_A." in name and tensor.shape}
    for rank in (settings["r"], *settings.get("rank_pattern", {}).values()):
        if rank > max(ranks, default=0):
            raise UserError(f"{folder}: r = {rank}, but the widest matrix of {file} is of rank {max(ranks, default=0)}")
