"""adapter_config.json, which anyone may have written: the settings of LoRA that only compute, and no others."""

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlm.errors import UserError
from dlm.models.settings import read_json
from dlm.models.shards import KINDS, declared

NAME = re.compile(r"[\w.]+")


def _rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**20


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _names(value: Any) -> bool:
    return value == "all-linear" or (isinstance(value, list) and all(map(_name, value)))


def _name(value: Any) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _pattern(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(_name(key) and check(entry) for key, entry in value.items())


READ: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_rank, "a whole number from 1 up"),
    "lora_alpha": (_number, "a number from 0 up"),
    "lora_dropout": (lambda value: _number(value) and value <= 1, "a number from 0 to 1"),
    "target_modules": (_names, 'a list of module names, or "all-linear"'),
    "exclude_modules": (_names, "a list of module names"),
    "rank_pattern": (_pattern(_rank), "an object of module names with whole numbers"),
    "alpha_pattern": (_pattern(_number), "an object of module names with numbers"),
    "layers_to_transform": (lambda value: isinstance(value, list) and all(type(i) is int for i in value), "a list"),
    "layers_pattern": (lambda value: _name(value) or _names(value), "a module's name"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "use_dora": (lambda value: isinstance(value, bool), "true or false"),
}
"""What is read, with what it must be. Names are names: peft would take them for patterns that may never end."""
IGNORED = (
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode"),
    *("auto_mapping", "init_lora_weights", "megatron_core", "qalora_group_size", "loftq_config"),
)
"""What does not change an adapter that is trained already."""


def lora_settings(folder: Path, file: str) -> dict[str, Any]:
    """The arguments of peft's `LoraConfig` as `folder`/`file` states them."""
    found: dict[str, Any] = {}
    for key, value in read_json(folder / file).items():
        if key in IGNORED or value is None or value is False or value in ({}, [], "none"):
            continue
        if key not in READ:
            raise UserError(f"{folder / file}: {key} = {reprlib.repr(value)} is not supported")
        fits, kind = READ[key]
        if not fits(value):
            raise UserError(f"{folder / file}: {key} = {reprlib.repr(value)} should be {kind}")
        found[key] = value
    for key in ("r", "target_modules"):
        if key not in found:
            raise UserError(f"{folder / file} has no {key!r}, so it is not the adapter of a LoRA")
    return found


def check_weights(settings: Mapping[str, Any], folder: Path, file: str) -> None:
    """The weights are floating-point, and as wide as the settings say, before room is made for them."""
    weights = declared([folder / file])
    for name, tensor in weights.items():
        if tensor.kind not in KINDS:
            raise UserError(f"{tensor.file}: tensor {name!r} is stored as {tensor.kind}; use {', '.join(KINDS)}")
    ranks = {tensor.shape[0] for name, tensor in weights.items() if ".lora_A." in name and tensor.shape}
    for rank in (settings["r"], *settings.get("rank_pattern", {}).values()):
        if rank > max(ranks, default=0):
            raise UserError(f"{folder}: r = {rank}, but the widest matrix of {file} is of rank {max(ranks, default=0)}")
