"""The checkpoint families, a file each. To add one: a file with its FAMILY, and a line in FAMILIES."""

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dlm.errors import UserError
from dlm.models.config import ModelConfig
from dlm.models.families import (
    dream,
    fast_dllm,
    llada,
    llada2,
    llada_moe,
    llama,
    own,
    qwen2,
    qwen3,
    sdar,
)
from dlm.models.families.family import Family as Family
from dlm.models.settings import Settings, first_id

FAMILIES: dict[str, Family] = {
    "dlm": own.FAMILY,
    "llada": llada.FAMILY,
    "llada_moe": llada_moe.FAMILY,
    "Dream": dream.FAMILY,
    "sdar": sdar.FAMILY,
    "llada2_moe": llada2.FAMILY,
    "Fast_dLLM_Qwen": fast_dllm.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "llama": llama.FAMILY,
}
"""`model_type` of a checkpoint's config.json -> its family."""
OTHERS = {"dlm_latent": "dlm.latent.lm:read"}
"""`model_type` of what is no `Transformer` -> module:function that reads its folder."""
TOKENS = ("mask_token_id", "eos_token_id", "pad_token_id")
MOST_PROBLEMS = 3
"""Mistakes that one message names."""


def family_of(hub: Mapping[str, Any], source: str = "config.json") -> str:
    """The key of FAMILIES that a hub configuration belongs to."""
    stated = hub.get("model_type")
    if stated == "llada" and hub.get("num_experts"):  # the mixture's checkpoints call themselves llada too
        return "llada_moe"
    for name, family in FAMILIES.items():
        if stated == name or stated in family.aliases:
            return name
    raise UserError(
        f"{source}: model_type={reprlib.repr(stated)} is not a known family; known: {', '.join((*FAMILIES, *OTHERS))}"
    )


def config_from_hub(
    hub: Mapping[str, Any], source: str = "config.json", ids: Mapping[str, int | None] | None = None
) -> ModelConfig:
    """A hub configuration as ours; `ids` are special tokens found elsewhere in the checkpoint, for what it leaves out."""
    settings = Settings(hub, source)
    name = family_of(hub, source)
    family = FAMILIES[name]
    settings.only("quantization_config")
    fields = family.read(settings)
    if name != "dlm":
        fields |= {"attention": family.attention, "shifted_logits": family.shifted_logits}
        fields |= {"mask_in_softmax": family.mask_in_softmax}
    for key in TOKENS:
        stated = first_id(hub.get(key), source, key)
        found = [(ids or {}).get(key), getattr(family, key)]  # only a guess: ignored where the vocabulary is smaller
        inside = [token for token in found if token is not None and token < fields["vocab_size"]]
        fields[key] = stated if stated is not None else next(iter(inside), None)
    try:
        return ModelConfig.model_validate({**fields, "model_type": name}, strict=True)
    except ValidationError as error:
        problems = "; ".join(map(_problem, error.errors()[:MOST_PROBLEMS]))
        raise UserError(f"{source}: {problems}") from error


def _problem(error: ErrorDetails) -> str:
    """One of pydantic's complaints, with the value."""
    where, said = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    return f"{where} = {reprlib.repr(error['input'])}: {said}" if where else said


def config_to_hub(config: ModelConfig) -> dict[str, Any]:
    """Our configuration as the hub spells it."""
    family = FAMILIES[config.model_type]
    ids = {key: getattr(config, key) for key in TOKENS}
    stated = {key: value for key, value in ids.items() if value is not None}
    return {"architectures": [family.architecture], "model_type": config.model_type, **family.write(config), **stated}
