"""The configuration of a `dlm` checkpoint, for transformers with `trust_remote_code=True`. Needs transformers alone."""

from typing import Any

from transformers import PretrainedConfig

ATTENTION = ("bidirectional", "causal", "block_causal")


class DLMConfig(PretrainedConfig):
    """The shape of the network, under the names that transformers uses; and what makes it a diffusion model:

    - `attention`: "bidirectional" (every token sees every token), "causal", or "block_causal" (every token sees its own
      block of `block_length` tokens and the blocks before it; blocks are counted by position);
    - `mask_token_id`: the token that stands where the text is unknown. The model is given a sequence with masks and
      predicts the token behind each of them. It is never a prediction: set its logit to minus infinity before sampling
      (`mask_in_softmax` says that the model was trained with the mask's logit left in the softmax);
    - `shifted_logits`: the logits at position i - 1 predict the token at position i, as in an autoregressive model (from
      which such a model was converted); otherwise the logits at i predict the token at i.

    `moe` is None for a dense network, or a dictionary: `num_experts`, `num_experts_per_tok`, `intermediate_size` of one
    expert, `num_shared_experts`, `first_k_dense` (so many first layers are dense), `n_group` and `topk_group` (experts are
    chosen from the best groups only), `score_function` ("sigmoid" or "softmax"), `norm_topk_prob`,
    `routed_scaling_factor`, `expert_bias` (a bias that takes part in the choice of experts but not in their weights).
    """

    model_type = "dlm"

    def __init__(
        self,
        vocab_size: int = 32_000,
        hidden_size: int = 256,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        head_dim: int = 64,
        intermediate_size: int = 704,
        position_embedding: str = "rope",
        rope_theta: float = 10_000.0,
        rotary_dim: int | None = None,
        rope_scaling: dict[str, Any] | None = None,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int = 2048,
        rms_norm_eps: float = 1e-6,
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        attention: str = "bidirectional",
        block_length: int | None = None,
        shifted_logits: bool = False,
        mask_in_softmax: bool = False,
        mask_token_id: int | None = None,
        initializer_range: float = 0.02,
        moe: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        if attention not in ATTENTION:
            raise ValueError(f"attention={attention!r} is not known; use one of {', '.join(ATTENTION)}")
        if attention == "block_causal" and not block_length:
            raise ValueError("attention='block_causal' needs block_length")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.position_embedding = position_embedding
        self.rotary_dim = rotary_dim
        # One dictionary, as transformers 5 spells it; the two older keys are read as well.
        self.rope_parameters = {
            "rope_type": "default",
            "rope_theta": rope_theta,
            **(rope_scaling or rope_parameters or {}),
        }
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.qkv_bias = qkv_bias
        self.o_bias = o_bias
        self.mlp_bias = mlp_bias
        self.qk_norm = qk_norm
        self.attention = attention
        self.block_length = block_length
        self.shifted_logits = shifted_logits
        self.mask_in_softmax = mask_in_softmax
        self.mask_token_id = mask_token_id
        self.initializer_range = initializer_range
        self.moe = moe
        kwargs["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**kwargs)
