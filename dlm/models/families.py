"""The checkpoint families: how each spells its configuration and its weights."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dlm.errors import UserError
from dlm.models.config import AttentionKind, ModelConfig
from dlm.models.hub_tensors import Names
from dlm.models.settings import Settings, first_id
from dlm.models.spelling import (
    read_dlm,
    read_fast_dllm,
    read_llada,
    read_llada2,
    read_llada_moe,
    read_llama,
    read_qwen2,
    read_qwen3,
    read_sdar,
    write_dlm,
    write_fast_dllm,
    write_llada,
    write_llada2,
    write_llada_moe,
    write_llama,
    write_qwen2,
    write_qwen3,
    write_sdar,
)

TOKENS = ("mask_token_id", "eos_token_id", "pad_token_id")
MOST_PROBLEMS = 3
"""Mistakes that one message names."""


@dataclass(frozen=True)
class Family:
    """One checkpoint family. `names` are the spellings of its weights: the first is written, the others are read too."""

    architecture: str
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    names: tuple[Names, ...]
    attention: AttentionKind = "bidirectional"
    shifted_logits: bool = False
    mask_in_softmax: bool = False
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    aliases: tuple[str, ...] = ()


QWEN_NAMES: Names = {
    "embed": "model.embed_tokens",
    "positions": "model.embed_positions",
    "layers.*.attn_norm": "model.layers.*.input_layernorm",
    "layers.*.attn": "model.layers.*.self_attn",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp": "model.layers.*.mlp",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
EXPERT_NAMES: Names = {
    "layers.*.mlp.router": "model.layers.*.mlp.gate",
    "layers.*.mlp.experts.gate_up": (
        "model.layers.*.mlp.experts.#.gate_proj.weight",
        "model.layers.*.mlp.experts.#.up_proj.weight",
    ),
    "layers.*.mlp.experts.down": "model.layers.*.mlp.experts.#.down_proj.weight",
    "layers.*.mlp.shared": "model.layers.*.mlp.shared_experts",
}
STACKED_EXPERT_NAMES: Names = {  # as trainers with fused experts write them
    "layers.*.mlp.experts.gate_up": ("model.layers.*.mlp.experts.gate_proj", "model.layers.*.mlp.experts.up_proj"),
    "layers.*.mlp.experts.down": "model.layers.*.mlp.experts.down_proj",
}
LLADA_NAMES: Names = {
    "embed": "model.transformer.wte",
    "layers.*.attn_norm": "model.transformer.blocks.*.attn_norm",
    "layers.*.attn.q_proj": "model.transformer.blocks.*.q_proj",
    "layers.*.attn.k_proj": "model.transformer.blocks.*.k_proj",
    "layers.*.attn.v_proj": "model.transformer.blocks.*.v_proj",
    "layers.*.attn.o_proj": "model.transformer.blocks.*.attn_out",
    "layers.*.mlp_norm": "model.transformer.blocks.*.ff_norm",
    "layers.*.mlp.gate_proj": "model.transformer.blocks.*.ff_proj",
    "layers.*.mlp.up_proj": "model.transformer.blocks.*.up_proj",
    "layers.*.mlp.down_proj": "model.transformer.blocks.*.ff_out",
    "norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
}
LLADA2_NAMES: Names = {
    **QWEN_NAMES,
    **EXPERT_NAMES,
    "embed": "model.word_embeddings",
    "layers.*.attn.q_proj": "model.layers.*.attention.query_key_value",
    "layers.*.attn.k_proj": "model.layers.*.attention.query_key_value",
    "layers.*.attn.v_proj": "model.layers.*.attention.query_key_value",
    "layers.*.attn.o_proj": "model.layers.*.attention.dense",
    "layers.*.attn.q_norm": "model.layers.*.attention.query_layernorm",
    "layers.*.attn.k_norm": "model.layers.*.attention.key_layernorm",
    "layers.*.mlp.router.bias": "model.layers.*.mlp.gate.expert_bias",
}

FAMILIES: dict[str, Family] = {
    "dlm": Family("DLMForMaskedLM", read_dlm, write_dlm, (QWEN_NAMES,)),
    "llada": Family(
        "LLaDAModelLM", read_llada, write_llada, (LLADA_NAMES,), mask_in_softmax=True, mask_token_id=126336
    ),
    "llada_moe": Family(
        "LLaDAMoEModelLM",
        read_llada_moe,
        write_llada_moe,
        ({**QWEN_NAMES, **EXPERT_NAMES},),
        mask_in_softmax=True,
        mask_token_id=156895,
        aliases=("lladamoe",),
    ),
    "Dream": Family(
        "DreamModel",
        read_qwen2,
        write_qwen2,
        (QWEN_NAMES,),
        shifted_logits=True,
        mask_in_softmax=True,
        mask_token_id=151666,
    ),
    "sdar": Family(
        "SDARForCausalLM",
        read_sdar,
        write_sdar,
        (QWEN_NAMES,),
        attention="block_causal",
        mask_in_softmax=True,
        mask_token_id=151669,
    ),
    "llada2_moe": Family(
        "LLaDA2MoeModelLM",
        read_llada2,
        write_llada2,
        (LLADA2_NAMES, {**LLADA2_NAMES, **STACKED_EXPERT_NAMES}),
        attention="block_causal",
        mask_in_softmax=True,
        mask_token_id=156895,
        eos_token_id=156892,
        aliases=("llada2_moe_veomni",),
    ),
    "Fast_dLLM_Qwen": Family(
        "Fast_dLLM_QwenForCausalLM",
        read_fast_dllm,
        write_fast_dllm,
        (QWEN_NAMES,),
        attention="block_causal",
        shifted_logits=True,
        mask_in_softmax=True,
        mask_token_id=151665,
        eos_token_id=151645,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", read_qwen2, write_qwen2, (QWEN_NAMES,), attention="causal", shifted_logits=True
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", read_qwen3, write_qwen3, (QWEN_NAMES,), attention="causal", shifted_logits=True
    ),
    "llama": Family(
        "LlamaForCausalLM", read_llama, write_llama, (QWEN_NAMES,), attention="causal", shifted_logits=True
    ),
}


def family_of(hub: Mapping[str, Any], source: str = "config.json") -> str:
    """The key of FAMILIES that a hub configuration belongs to."""
    stated = hub.get("model_type")
    if stated == "llada" and hub.get("num_experts"):  # the mixture's checkpoints call themselves llada too
        return "llada_moe"
    for name, family in FAMILIES.items():
        if stated == name or stated in family.aliases:
            return name
    raise UserError(f"{source}: model_type={reprlib.repr(stated)} is not a known family; known: {', '.join(FAMILIES)}")


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
