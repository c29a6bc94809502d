"""What several families share: the configuration in transformers' style, and the names of weights in Qwen's."""

from typing import Any

from dlm.errors import UserError
from dlm.models.config import ModelConfig, MoEConfig
from dlm.models.hub_tensors import Names
from dlm.models.settings import Settings

Fields = dict[str, Any]

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


def read_shape(hub: Settings, context: int = 2048) -> Fields:
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


def write_shape(config: ModelConfig) -> Fields:
    keys = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    keys += ["max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "rope_theta"]
    return {"hidden_act": "silu", "rope_scaling": config.rope_scaling, **{key: getattr(config, key) for key in keys}}


def mixture_of(config: ModelConfig, family: str) -> MoEConfig:
    if config.moe is None:
        raise UserError(f"family = {family!r} is a mixture of experts, and this network is dense: leave family out")
    return config.moe
