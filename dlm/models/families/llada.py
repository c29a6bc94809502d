"""LLaDA (arXiv 2502.09992)."""

from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.shape import Fields
from dlm.models.hub_tensors import Names
from dlm.models.settings import Settings

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


FAMILY = Family("LLaDAModelLM", read_llada, write_llada, (LLADA_NAMES,), mask_in_softmax=True, mask_token_id=126336)
