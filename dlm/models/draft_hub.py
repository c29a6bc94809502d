"""A draft's config.json, read as z-lab, SpecForge and speculators write it, written as z-lab does. Imports without torch."""

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dlm.errors import UserError
from dlm.models.config import ModelConfig
from dlm.models.draft_config import ARCHITECTURES, DraftConfig, default_layer_ids, is_draft
from dlm.models.settings import Settings

SLIDING, FULL = "sliding_attention", "full_attention"


def draft_config_from_hub(hub: Mapping[str, Any], source: str = "config.json", mask: int | None = None) -> DraftConfig:
    """A draft's configuration; `mask` is the token for files that name none. Raises UserError naming the key."""
    if not is_draft(hub):
        raise UserError(
            f'{source} is no DFlash draft: it has neither "dflash_config" nor one of the architectures '
            f"{', '.join(ARCHITECTURES)} (model_type = {reprlib.repr(hub.get('model_type'))})"
        )
    read = _speculators if hub.get("speculators_model_type") == "dflash" else _zlab
    fields = read(hub, source)
    if fields["mask_token_id"] is None:
        fields["mask_token_id"] = mask
    if fields["mask_token_id"] is None:
        raise UserError(f"{source} has no 'mask_token_id', and neither the target nor its tokenizer has a mask token")
    try:
        return DraftConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise UserError(f"{source}: {where + ': ' if where else ''}{said}") from error


def _layers(hub: Settings) -> ModelConfig:
    """The layers, as Qwen3's. z-lab's own code reads the same keys."""
    hub.only("hidden_act", "silu")
    heads, bias = hub.size("num_attention_heads"), hub.get("attention_bias", default=False)
    fields = {
        "model_type": "qwen3",
        "attention": "bidirectional",
        "vocab_size": hub.size("vocab_size"),
        "hidden_size": hub.size("hidden_size"),
        "num_hidden_layers": hub.size("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": hub.get("num_key_value_heads", default=heads),
        "head_dim": hub.head_dim(),
        "intermediate_size": hub.size("intermediate_size"),
        "max_position_embeddings": hub.size("max_position_embeddings", default=32_768),
        "rms_norm_eps": hub.get("rms_norm_eps", default=1e-6),
        "initializer_range": hub.get("initializer_range", default=0.02),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        **hub.rope(),
    }
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{hub.source}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _zlab(hub: Mapping[str, Any], source: str) -> dict[str, Any]:
    """z-lab's and SpecForge's: keys are looked up in `dflash_config` first, then at the top level."""
    settings = Settings(hub, source)
    own = settings.table("dflash_config")
    keys = Settings({**hub, **{key: value for key, value in own.items() if value is not None}}, source)
    network, depth = _layers(settings), settings.size("num_target_layers")
    layers = network.num_hidden_layers
    ids = keys.get("target_layer_ids", default=None)
    kinds = _kinds(settings, layers)
    causal = keys.get("is_causal", default=None)
    if causal is not None and not isinstance(causal, bool):
        raise settings.wrong(causal, "true or false", "is_causal")
    fields = {
        "network": network,
        "num_target_layers": depth,
        "target_layer_ids": default_layer_ids(depth, layers) if ids is None else _ids(ids, source, "target_layer_ids"),
        "block_size": keys.get("block_size", default=16),
        "mask_token_id": keys.get("mask_token_id", default=None),
        "windows": [keys.size("sliding_window") if kind == SLIDING else None for kind in kinds],
        "causal": [kind == SLIDING if causal is None else causal for kind in kinds],
        "input_embedding_scale": keys.get("input_embedding_scale", default=1.0),
        "output_multiplier": keys.get("output_multiplier", default=1.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", default=None) or None,
        "draft_vocab_size": keys.get("draft_vocab_size", default=None),
    }
    if ARCHITECTURES[1] in (hub.get("architectures") or []) or keys.get("selector_rank", default=None) is not None:
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            fields[key] = keys.size(key)
    return fields


def _speculators(hub: Mapping[str, Any], source: str) -> dict[str, Any]:
    """speculators': layers under `transformer_layer_config`, and layer ids that count the embedding as 0."""
    settings = Settings(hub, source)
    inner = settings.table("transformer_layer_config")
    layers = Settings(inner, f"{source}: transformer_layer_config")
    network, own = _layers(layers), hub.get("draft_vocab_size")
    ids = [i - 1 for i in _ids(settings.get("aux_hidden_state_layer_ids"), source, "aux_hidden_state_layer_ids")]
    kinds = _kinds(layers, network.num_hidden_layers)
    return {
        "network": network,
        "draft_vocab_size": None if own == network.vocab_size else own,
        "num_target_layers": settings.get("num_target_layers", default=max(ids) + 1),
        "target_layer_ids": ids,
        "block_size": settings.get("block_size", default=16),
        "mask_token_id": settings.get("mask_token_id", default=None),
        "windows": [layers.size("sliding_window") if kind == SLIDING else None for kind in kinds],
        "causal": [kind == SLIDING and not hub.get("sliding_window_non_causal") for kind in kinds],
    }


def _ids(value: Any, source: str, key: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
        raise UserError(f"{source}: {key} = {reprlib.repr(value)} should be a list of layer numbers")
    return value


def _kinds(hub: Settings, layers: int) -> list[str]:
    """Of each layer, how it sees."""
    kinds = hub.get("layer_types", default=None) or [FULL] * layers
    if not isinstance(kinds, list) or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise hub.wrong(kinds, f"a list of {FULL!r} and {SLIDING!r}", "layer_types")
    return kinds


def draft_config_to_hub(config: DraftConfig) -> dict[str, Any]:
    """The configuration as z-lab writes it, for z-lab's code, SpecForge, SGLang and vLLM."""
    network, own = (
        config.network,
        {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
    )
    for key in ("input_embedding_scale", "output_multiplier"):
        if getattr(config, key) != 1:
            own[key] = getattr(config, key)
    if config.final_logit_softcapping is not None:
        own["final_logit_softcapping"] = config.final_logit_softcapping
    if config.draft_vocab_size is not None:
        own["draft_vocab_size"] = config.draft_vocab_size
    if config.selects:
        keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        own |= {"block_size": config.block_size, **{key: getattr(config, key) for key in keys}}
    keys = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    keys += [
        "intermediate_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "initializer_range",
        "rope_theta",
        "rope_scaling",
    ]
    window = next((window for window in config.windows if window is not None), None)
    if any(other not in (None, window) for other in config.windows):
        raise UserError(f"z-lab's format cannot say windows of several lengths: {config.windows}")
    hub = {
        "architectures": [ARCHITECTURES[config.selects]],
        "model_type": "qwen3",
        "attention_bias": network.qkv_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": own,
        "hidden_act": "silu",
        "layer_types": [FULL if window is None else SLIDING for window in config.windows],
        "num_target_layers": config.num_target_layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": False,
        **{key: getattr(network, key) for key in keys},
    }
    if network.rotary_dim is not None:
        hub["partial_rotary_factor"] = network.rotary_dim / network.head_dim
    if list(config.causal) != [window is not None for window in config.windows]:
        if len(set(config.causal)) > 1:
            raise UserError(
                "z-lab's format cannot say which of several layers are causal: all, none, or the sliding ones"
            )
        hub["is_causal"] = config.causal[0]
    return hub
