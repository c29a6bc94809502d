"""How each family spells its configuration, read and written."""

import reprlib
from typing import Any

from dlm.errors import UserError
from dlm.models.config import ModelConfig, MoEConfig
from dlm.models.settings import Settings

Fields = dict[str, Any]


def read_dlm(hub: Settings) -> Fields:
    """Our own configuration is our own spelling; keys that transformers adds are not ours."""
    fields = {key: value for key, value in hub.values.items() if key in ModelConfig.model_fields}
    fields |= {"vocab_size": hub.size("vocab_size")}
    return fields | hub.rope() if "rope_parameters" in hub.values else fields


def write_dlm(config: ModelConfig) -> Fields:
    return config.model_dump(mode="json")


def _read_shape(hub: Settings, context: int = 2048) -> Fields:
    """What every configuration in transformers' style has; `context` is the family's own where the file names none."""
    hub.only("hidden_act", "silu")
    heads, layers = hub.size("num_attention_heads"), hub.size("num_hidden_layers")
    hub.no_sliding_window(layers)
    return {
        "vocab_size": hub.size("vocab_size"),
        "hidden_size": hub.size("hidden_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": hub.get("num_key_value_heads", default=heads) or heads,
        "head_dim": hub.head_dim(),
        "max_position_embeddings": hub.size("max_position_embeddings", default=context),
        "rms_norm_eps": hub.get("rms_norm_eps", default=1e-6),
        "tie_word_embeddings": hub.get("tie_word_embeddings", default=False),
        "initializer_range": hub.get("initializer_range", default=0.02),
        **hub.rope(),
    }


def _write_shape(config: ModelConfig) -> Fields:
    keys = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    keys += ["max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "rope_theta"]
    return {"hidden_act": "silu", "rope_scaling": config.rope_scaling, **{key: getattr(config, key) for key in keys}}


def read_qwen2(hub: Settings) -> Fields:
    """Biases on q, k and v; also the shape of Dream and Fast-dLLM v2."""
    return {**_read_shape(hub, 32_768), "intermediate_size": hub.size("intermediate_size"), "qkv_bias": True}


def write_qwen2(config: ModelConfig) -> Fields:
    return {**_write_shape(config), "intermediate_size": config.intermediate_size, "use_sliding_window": False}


def read_fast_dllm(hub: Settings) -> Fields:
    """Fast-dLLM v2 (arXiv 2509.26328): Qwen2 under block-causal attention."""
    hub.only("use_relay", False)
    return {**read_qwen2(hub), "block_length": hub.size("bd_size", default=32)}


def write_fast_dllm(config: ModelConfig) -> Fields:
    return {**write_qwen2(config), "bd_size": config.block_length}


def read_llama(hub: Settings, context: int = 2048) -> Fields:
    """One switch for all attention biases, one for the feed-forward's."""
    bias = hub.get("attention_bias", default=False)
    fields = {**_read_shape(hub, context), "intermediate_size": hub.size("intermediate_size")}
    fields |= {"qkv_bias": bias, "o_bias": bias}
    return {**fields, "mlp_bias": hub.get("mlp_bias", default=False)}


def write_llama(config: ModelConfig) -> Fields:
    fields = {**_write_shape(config), "intermediate_size": config.intermediate_size}
    return {**fields, "attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}


def read_qwen3(hub: Settings) -> Fields:
    """As llama, with head norms."""
    return {**read_llama(hub, 32_768), "qk_norm": True}


def write_qwen3(config: ModelConfig) -> Fields:
    return {**write_llama(config), "use_sliding_window": False}


def read_sdar(hub: Settings) -> Fields:
    """SDAR (arXiv 2510.06303): Qwen3 under block-causal attention."""
    return {**read_qwen3(hub), "block_length": hub.size("block_size", default=4)}


def write_sdar(config: ModelConfig) -> Fields:
    fused = {"fuse_cross_entropy": True}  # as published, whose code wants to be told
    return {**write_qwen3(config), **fused, "block_size": config.block_length}


LLADA_FIXED = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "include_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "rope": True,
    "scale_logits": False,
}
"""Settings of LLaDA's code that change the network, and the one value of each that a published checkpoint has."""


def read_llada(hub: Settings) -> Fields:
    """LLaDA (arXiv 2502.09992); `embedding_size` is the vocabulary padded to a round number."""
    for key, value in LLADA_FIXED.items():
        hub.only(key, value)
    hub.only("clip_qkv")
    hub.only("rope_scaling")
    width, heads = hub.size("d_model"), hub.size("n_heads")
    shared = 1 if hub.get("multi_query_attention", default=False) else heads
    return {
        "vocab_size": hub.size("embedding_size", "vocab_size"),
        "hidden_size": width,
        "num_hidden_layers": hub.size("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": hub.size("n_kv_heads", default=shared),
        "head_dim": hub.width_of_head("d_model", "n_heads"),
        "intermediate_size": hub.size("mlp_hidden_size", default=int(hub.number("mlp_ratio", default=4) * width)),
        "max_position_embeddings": hub.size("max_sequence_length", default=1024),
        "rms_norm_eps": hub.get("rms_norm_eps", default=1e-5),
        "rope_theta": hub.get("rope_theta", default=10_000.0),
        "qkv_bias": hub.get("include_qkv_bias", default=False),
        "tie_word_embeddings": hub.get("weight_tying", default=False),
        "initializer_range": hub.get("init_std", default=0.02),
    }


def write_llada(config: ModelConfig) -> Fields:
    return {
        **LLADA_FIXED,
        "vocab_size": config.vocab_size,
        "embedding_size": config.vocab_size,
        "d_model": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "mlp_hidden_size": config.intermediate_size,
        "max_sequence_length": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "include_qkv_bias": config.qkv_bias,
        "weight_tying": config.tie_word_embeddings,
        "init_std": config.initializer_range,
    }


def read_llada_moe(hub: Settings) -> Fields:
    """LLaDA-MoE: softmax router without normalisation; a list says which layers are sparse."""
    hub.only("moe_router_enable_expert_bias", False)
    hub.only("moe_router_score_function", "softmax")
    hub.only("shared_expert_intermediate_size", 0, -1)
    hub.only("clip_qkv")
    fields = _read_shape(hub)
    sparse = hub.get("moe_layer_freq", default=[])
    if not isinstance(sparse, list):
        raise hub.wrong(sparse, "a list with one number for each layer", "moe_layer_freq")
    dense = sparse.index(1) if 1 in sparse else len(sparse)
    if sparse and (len(sparse) != fields["num_hidden_layers"] or 0 in sparse[dense:]):
        raise UserError(
            f"{hub.source}: moe_layer_freq={reprlib.repr(sparse)} is not supported; it needs one number for each of the "
            f"{fields['num_hidden_layers']} layers, and dense layers must come first"
        )
    moe = {
        "num_experts": hub.size("num_experts"),
        "num_experts_per_tok": hub.size("num_experts_per_tok"),
        "intermediate_size": hub.size("expert_intermediate_size"),
        "first_k_dense": dense,
        "score_function": "softmax",
        "norm_topk_prob": False,
    }
    bias = hub.get("attention_bias", default=False)
    fields |= {"qkv_bias": bias, "o_bias": bias, "qk_norm": hub.get("qk_layernorm", default=False), "moe": moe}
    return {**fields, "intermediate_size": hub.size("dense_intermediate_size")}


def _mixture(config: ModelConfig, family: str) -> MoEConfig:
    if config.moe is None:
        raise UserError(f"family = {family!r} is a mixture of experts, and this network is dense: leave family out")
    return config.moe


def write_llada_moe(config: ModelConfig) -> Fields:
    moe = _mixture(config, "llada_moe")
    return {
        **_write_shape(config),
        "attention_bias": config.o_bias,
        "qk_layernorm": config.qk_norm,
        "dense_intermediate_size": config.intermediate_size,
        "expert_intermediate_size": moe.intermediate_size,
        "moe_layer_freq": [int(i >= moe.first_k_dense) for i in range(config.num_hidden_layers)],
        "moe_router_score_function": moe.score_function,
        "partial_rotary_factor": 1.0 if config.rotary_dim is None else config.rotary_dim / config.head_dim,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
    }


def read_llada2(hub: Settings) -> Fields:
    """LLaDA2 (arXiv 2512.15745): sigmoid router, group-limited choice, partial rotation, fused q, k, v."""
    hub.only("norm_head", False)
    hub.only("norm_softmax", False)
    hub.only("use_rmsnorm", True)
    hub.only("use_qk_norm", True)
    hub.only("norm_topk_prob", True)
    hub.only("score_function", "sigmoid")
    fields = _read_shape(hub)
    moe = {
        "num_experts": hub.size("num_experts"),
        "num_experts_per_tok": hub.size("num_experts_per_tok"),
        "intermediate_size": hub.size("moe_intermediate_size"),
        "num_shared_experts": hub.get("num_shared_experts", default=0),
        "first_k_dense": hub.get("first_k_dense_replace", default=0),
        "n_group": hub.size("n_group", default=8),
        "topk_group": hub.size("topk_group", default=4),
        "routed_scaling_factor": hub.get("routed_scaling_factor", default=2.5),
        "expert_bias": True,  # a buffer of every published gate, zero where it is not used
    }
    fields |= {"qkv_bias": hub.get("use_qkv_bias", default=False), "o_bias": hub.get("use_bias", default=False)}
    fields |= {"qk_norm": True, "moe": moe, "block_length": hub.size("block_size", "block_length", default=32)}
    return {**fields, "intermediate_size": hub.size("intermediate_size")}


def write_llada2(config: ModelConfig) -> Fields:
    moe = _mixture(config, "llada2_moe")
    rotary = config.rotary_dim or config.head_dim
    return {
        **_write_shape(config),
        "intermediate_size": config.intermediate_size,
        "rotary_dim": rotary,
        "partial_rotary_factor": rotary / config.head_dim,
        "block_size": config.block_length,
        "use_qkv_bias": config.qkv_bias,
        "use_bias": config.o_bias,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.intermediate_size,
        "num_shared_experts": moe.num_shared_experts or None,
        "first_k_dense_replace": moe.first_k_dense,
        "n_group": moe.n_group,
        "topk_group": moe.topk_group,
        "norm_topk_prob": moe.norm_topk_prob,
        "score_function": moe.score_function,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "use_sliding_window": False,
    }
