"""A DFlash draft's shape, and how its config.json is told from others. Imports without torch."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dlm.models.config import ModelConfig, Number

MOST_BLOCK = 256
ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")


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
    mask_token_id: int = Field(ge=0, strict=True, description="token shown where a token is to be drafted")
    windows: tuple[int | None, ...] = Field(description="of each layer: how far it sees to either side; none: all")
    causal: tuple[bool, ...] = Field(description="of each layer: whether rows of a block see only those before them")
    input_embedding_scale: Number = Field(default=1.0, description="factor on the target's embeddings")
    output_multiplier: Number = Field(default=1.0, description="factor on the logits")
    final_logit_softcapping: Number | None = Field(default=None, description="logits are c·tanh(logits / c)")
    draft_vocab_size: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="how many of the target's tokens it can draft; none: all (EAGLE-3, FR-Spec)",
    )
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
        if (self.draft_vocab_size or 0) > (self.network.vocab_size or 0):
            raise ValueError(
                f"draft_vocab_size = {self.draft_vocab_size} is more than the vocabulary of {self.network.vocab_size} tokens"
            )
        return self


def default_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Where n layers read a target of L: its middle for n = 1, else spread evenly from 1 to L - 3."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers))


def new_config(
    target: ModelConfig, *, num_layers: int, block_size: int, target_layer_ids: Sequence[int] | None, **more: Any
) -> DraftConfig:
    """An untrained draft's shape: heads, widths and positions as the target's; `more` are other fields of `DraftConfig`, and
    `intermediate_size`."""
    network = ModelConfig(
        model_type="qwen3",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        intermediate_size=more.pop("intermediate_size", target.intermediate_size),
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        qk_norm=True,
        initializer_range=target.initializer_range,
    )
    fields = {
        "network": network,
        "num_target_layers": target.num_hidden_layers,
        "target_layer_ids": tuple(target_layer_ids or default_layer_ids(target.num_hidden_layers, num_layers)),
        "block_size": block_size,
        "windows": (None,) * num_layers,
        "causal": (False,) * num_layers,
        **more,
    }
    return DraftConfig.model_validate(fields)


def is_draft(hub: Mapping[str, Any]) -> bool:
    """Whether a config.json is a DFlash draft's, whatever its `model_type` says (z-lab's says "qwen3")."""
    named = hub.get("architectures")
    architectures = named if isinstance(named, list) else []
    return (
        isinstance(hub.get("dflash_config"), dict)
        or hub.get("speculators_model_type") == "dflash"
        or any(name in ARCHITECTURES for name in architectures)
    )
