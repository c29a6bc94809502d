"""`ModelConfig`, the shape of a network. Imports without torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

AttentionKind = Literal["bidirectional", "causal", "block_causal"]
MOST_LAYERS, MOST_EXPERTS, MOST_HEADS = 4096, 4096, 2**14
MOST_WIDTH, MOST_TOKENS, MOST_POSITIONS, MOST_BLOCK = 2**20, 2**24, 2**31 - 1, 2**20
"""Limits well above every published network: a larger value is a mistake, and is refused before anything is built."""

Number = Annotated[float, Field(allow_inf_nan=False)]


class MoEConfig(BaseModel, frozen=True, extra="forbid"):
    """Mixture-of-experts feed-forward: sigmoid or softmax router, optional groups, bias and shared experts."""

    num_experts: int = Field(gt=0, le=MOST_EXPERTS, description="routed experts a layer")
    num_experts_per_tok: int = Field(gt=0, description="experts each token is sent to")
    intermediate_size: int = Field(gt=0, le=MOST_WIDTH, description="hidden width of one expert")
    num_shared_experts: int = Field(
        default=0, ge=0, le=MOST_EXPERTS, description="experts every token passes through, of the same width each"
    )
    first_k_dense: int = Field(default=0, ge=0, description="this many first layers keep a dense feed-forward")
    n_group: int = Field(default=1, gt=0, description="router groups (group-limited top-k)")
    topk_group: int = Field(default=1, gt=0, description="groups a token may choose experts from")
    score_function: Literal["sigmoid", "softmax"] = Field(default="sigmoid", description="router score")
    norm_topk_prob: bool = Field(default=True, description="normalise the chosen experts' weights to sum to 1")
    routed_scaling_factor: Number = Field(default=1.0, description="factor on the routed experts' sum")
    expert_bias: bool = Field(
        default=False, description="per-expert bias that takes part in the choice, not in the weights"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than num_experts={self.num_experts}"
            )
        if self.topk_group < self.n_group:  # the groups take part
            each, rest = divmod(self.num_experts, self.n_group)
            if rest or each < 2:
                raise ValueError(
                    f"num_experts={self.num_experts} cannot be cut into n_group={self.n_group} groups of 2 or more"
                )
            if self.num_experts_per_tok > each * self.topk_group:
                raise ValueError(
                    f"num_experts_per_tok={self.num_experts_per_tok} is more than the {each * self.topk_group} experts "
                    f"of topk_group={self.topk_group} groups"
                )
        return self


class ModelConfig(BaseModel, frozen=True, extra="forbid"):
    """The one Transformer's shape; the names are those of Hugging Face configurations."""

    model_type: str = Field(default="dlm", description="checkpoint family: a key of dlm.models.families.FAMILIES")
    vocab_size: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="rows of the embedding, special tokens included; 0: the tokenizer's, when training",
    )
    hidden_size: int = Field(default=256, gt=0, le=MOST_WIDTH, description="width of the residual stream")
    num_hidden_layers: int = Field(default=6, gt=0, le=MOST_LAYERS, description="layers")
    num_attention_heads: int = Field(default=4, gt=0, le=MOST_HEADS, description="query heads")
    num_key_value_heads: int = Field(
        default=4, gt=0, le=MOST_HEADS, description="key/value heads; fewer than query heads is GQA"
    )
    head_dim: int = Field(default=64, gt=0, le=MOST_WIDTH, description="width of one head")
    intermediate_size: int = Field(
        default=704, gt=0, le=MOST_WIDTH, description="hidden width of the SwiGLU feed-forward"
    )
    position_embedding: Literal["rope", "learned"] = Field(
        default="rope",
        description="rotary positions, or a learned table of max_position_embeddings rows added to the input",
    )
    rope_theta: Number = Field(default=10_000.0, gt=0, description="base of the rotary frequencies")
    rotary_dim: int | None = Field(default=None, gt=0, description="rotated part of a head; none: the whole head")
    rope_scaling: dict[str, Any] | None = Field(
        default=None, description="linear, llama3 or yarn scaling, as checkpoints have it"
    )
    max_position_embeddings: int = Field(
        default=2048, gt=0, le=MOST_POSITIONS, description="longest sequence the network was made for"
    )
    rms_norm_eps: Number = Field(default=1e-6, gt=0, description="epsilon of RMSNorm")
    qkv_bias: bool = Field(default=False, description="bias on the query, key and value projections")
    o_bias: bool = Field(default=False, description="bias on the attention output projection")
    mlp_bias: bool = Field(default=False, description="bias on the feed-forward projections")
    qk_norm: bool = Field(default=False, description="RMSNorm on each query and key head before the rotation")
    tie_word_embeddings: bool = Field(default=False, description="the output head is the embedding")
    attention: AttentionKind = Field(default="bidirectional", description="who sees whom")
    block_length: int | None = Field(
        default=None, gt=0, le=MOST_BLOCK, description="block of block_causal attention (the diffusion block)"
    )
    shifted_logits: bool = Field(default=False, description="the token at i is predicted by the logits at i-1")
    mask_in_softmax: bool = Field(
        default=False,
        description="the family's own code leaves the mask token in the softmax; the mask is never chosen either way",
    )
    mask_token_id: int | None = Field(default=None, description="id of [MASK]")
    eos_token_id: int | None = Field(default=None, description="id of end-of-text")
    pad_token_id: int | None = Field(default=None, description="id of padding; none: end-of-text")
    initializer_range: Number = Field(default=0.02, gt=0, description="standard deviation of initial weights")
    moe: MoEConfig | None = Field(default=None, description="mixture of experts; none: dense")

    @property
    def context_length(self) -> int:
        """Positions the network was made for: `max_position_embeddings`, or more where the rotation is stretched. YaRN
        and linear scaling multiply the original length; checkpoints with llama3 scaling state the stretched one.
        """
        limit, scaling = self.max_position_embeddings, self.rope_scaling or {}
        kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
        before = scaling.get("original_max_position_embeddings") or limit
        if kind in ("yarn", "linear") and isinstance(factor, (int, float)) and isinstance(before, (int, float)):
            return max(limit, int(before * factor))
        return limit

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.attention == "block_causal" and not self.block_length:
            raise ValueError("attention='block_causal' needs block_length")
        rotary = self.rotary_dim or self.head_dim
        if rotary % 2 or rotary > self.head_dim:
            raise ValueError(f"rotary_dim={rotary} should be even and at most head_dim={self.head_dim}")
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(self, name)
            if self.vocab_size and token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"{name}={token} lies outside the vocabulary of {self.vocab_size} tokens")
        return self
