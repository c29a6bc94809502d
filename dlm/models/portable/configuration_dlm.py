"""The configuration of a `dlm` checkpoint, for transformers with `trust_remote_code=True`. Needs transformers alone."""

from typing import Any

from transformers import PretrainedConfig

ATTENTION = ("bidirectional", "causal", "block_causal")
DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "position_embedding": "rope",
    "rotary_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "qkv_bias": False,
    "o_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "attention": "bidirectional",
    "block_length": None,
    "shifted_logits": False,
    "mask_in_softmax": False,
    "mask_token_id": None,
    "initializer_range": 0.02,
    "moe": None,
}


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

    def __init__(self, **kwargs: Any) -> None:
        for name, default in DEFAULTS.items():
            setattr(self, name, kwargs.pop(name, default))
        if self.attention not in ATTENTION:
            raise ValueError(f"attention={self.attention!r} is not known; use one of {', '.join(ATTENTION)}")
        if self.attention == "block_causal" and not self.block_length:
            raise ValueError("attention='block_causal' needs block_length")
        # One dictionary, as transformers 5 spells it; the two older keys are read as well.
        rope = {"rope_type": "default", "rope_theta": kwargs.pop("rope_theta", 10_000.0)}
        scaling, parameters = kwargs.pop("rope_scaling", None), kwargs.pop("rope_parameters", None)
        self.rope_parameters = {**rope, **(scaling or parameters or {})}
        super().__init__(**{"tie_word_embeddings": False, **kwargs})
