"""A draft's config.json: what z-lab, SpecForge and speculators write, as data. Imports without torch."""

import reprlib
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dlm.errors import UserError
from dlm.models.config import ModelConfig, Number
from dlm.models.settings import Settings

MOST_BLOCK = 256
ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
SLIDING, FULL = "sliding_attention", "full_attention"


class DraftConfig(BaseModel):
    """A DFlash draft's shape. Names are those of z-lab's files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    network: ModelConfig = Field(description="the layers, as Qwen3's; vocabulary and width are the target's")
    num_target_layers: int = Field(gt=0, description="layers of the target it was trained for")
    target_layer_ids: tuple[int, ...] = Field(
        min_length=1, description="target layers whose outputs it reads, from 0, side by side in this order"
    )
    block_size: int = Field(
        default=16, ge=2, le=MOST_BLOCK, description="rows of a block: the anchor and the drafted tokens"
    )
    mask_token_id: int = Field(ge=0, description="token shown where a token is to be drafted")
    windows: tuple[int | None, ...] = Field(description="of each layer: how far it sees to either side; none: all")
    causal: tuple[bool, ...] = Field(description="of each layer: whether rows of a block see only those before them")
    input_embedding_scale: Number = Field(default=1.0, description="factor on the target's embeddings")
    output_multiplier: Number = Field(default=1.0, description="factor on the logits")
    final_logit_softcapping: Number | None = Field(default=None, description="logits are c·tanh(logits / c)")
    conv_kernel_size: int | None = Field(default=None, ge=1, description="DFlash 2: rows a dynamic convolution reads")
    conv_group_size: int | None = Field(default=None, ge=1, description="DFlash 2: channels that share its kernel")
    selector_rank: int | None = Field(default=None, ge=1, description="DFlash 2: width of the selector's codebooks")
    selector_top_k: int | None = Field(default=None, ge=1, description="DFlash 2: candidates a position")

    @property
    def selects(self) -> bool:
        """Whether it is a DFlash 2 draft: with convolutions and a candidate selector."""
        return self.selector_rank is not None

    @property
    def plain(self) -> bool:
        """Whether it is computed as any network is: Qwen3's own layers, with full sight, on unscaled embeddings."""
        sliding = any(self.windows) or any(self.causal)
        return not self.selects and not sliding and self.input_embedding_scale == 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if outside:
            raise ValueError(
                f"target_layer_ids has {outside[0]}, and num_target_layers = {self.num_target_layers}: layers count from 0"
            )
        layers = self.network.num_hidden_layers
        if len(self.windows) != layers or len(self.causal) != layers:
            raise ValueError(f"layer_types has {len(self.windows)} entries, and num_hidden_layers = {layers}")
        second = (self.conv_kernel_size, self.conv_group_size, self.selector_rank, self.selector_top_k)
        if any(x is not None for x in second):
            if any(x is None for x in second):
                raise ValueError(
                    "a DFlash 2 draft needs all of conv_kernel_size, conv_group_size, selector_rank and selector_top_k"
                )
            if self.network.hidden_size % (self.conv_group_size or 1):
                raise ValueError(
                    f"hidden_size = {self.network.hidden_size} is not a multiple of conv_group_size = {self.conv_group_size}"
                )
        if self.network.vocab_size and self.mask_token_id >= self.network.vocab_size:
            raise ValueError(
                f"mask_token_id = {self.mask_token_id} lies outside the vocabulary of {self.network.vocab_size} tokens"
            )
        return self


def default_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Where n layers read a target of L: its middle for n = 1, else spread evenly from 1 to L - 3."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers))


def is_draft(hub: Mapping[str, Any]) -> bool:
    """Whether a config.json is a DFlash draft's, whatever its `model_type` says (z-lab's says "qwen3")."""
    named = hub.get("architectures")
    architectures = named if isinstance(named, list) else []
    return (
        isinstance(hub.get("dflash_config"), dict)
        or hub.get("speculators_model_type") == "dflash"
        or any(name in ARCHITECTURES for name in architectures)
    )


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
    causal = hub.get("is_causal")
    fields = {
        "network": network,
        "num_target_layers": depth,
        "target_layer_ids": default_layer_ids(depth, layers) if ids is None else _ids(ids, source, "target_layer_ids"),
        "block_size": keys.get("block_size", default=16),
        "mask_token_id": keys.get("mask_token_id", default=None),
        "windows": [keys.size("sliding_window") if kind == SLIDING else None for kind in kinds],
        "causal": [kind == SLIDING if causal is None else bool(causal) for kind in kinds],
        "input_embedding_scale": keys.get("input_embedding_scale", default=1.0),
        "output_multiplier": keys.get("output_multiplier", default=1.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", default=None) or None,
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
    own = hub.get("draft_vocab_size")
    if own is not None and own != inner.get("vocab_size"):
        raise UserError(
            f"{source}: draft_vocab_size = {own!r} of {inner.get('vocab_size')!r} tokens: a draft with a vocabulary of its "
            "own is not read; only those that share the target's"
        )
    network = _layers(layers)
    ids = [i - 1 for i in _ids(settings.get("aux_hidden_state_layer_ids"), source, "aux_hidden_state_layer_ids")]
    kinds = _kinds(layers, network.num_hidden_layers)
    return {
        "network": network,
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
