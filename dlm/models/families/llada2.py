"""LLaDA2: a mixture of experts under block-causal attention, with shared experts and a router in groups."""

from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.shape import EXPERT_NAMES, QWEN_NAMES, Fields, mixture_of, read_shape, write_shape
from dlm.models.hub_tensors import Names
from dlm.models.settings import Settings

STACKED_EXPERT_NAMES: Names = {  # as trainers with fused experts write them
    "layers.*.mlp.experts.gate_up": ("model.layers.*.mlp.experts.gate_proj", "model.layers.*.mlp.experts.up_proj"),
    "layers.*.mlp.experts.down": "model.layers.*.mlp.experts.down_proj",
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


def read_llada2(hub: Settings) -> Fields:
    """LLaDA2 (arXiv 2512.15745): sigmoid router, group-limited choice, partial rotation, fused q, k, v."""
    hub.only("norm_head", False)
    hub.only("norm_softmax", False)
    hub.only("use_rmsnorm", True)
    hub.only("use_qk_norm", True)
    hub.only("norm_topk_prob", True)
    hub.only("score_function", "sigmoid")
    fields = read_shape(hub)
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
    moe = mixture_of(config, "llada2_moe")
    rotary = config.rotary_dim or config.head_dim
    return {
        **write_shape(config),
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


FAMILY = Family(
    "LLaDA2MoeModelLM",
    read_llada2,
    write_llada2,
    (LLADA2_NAMES, {**LLADA2_NAMES, **STACKED_EXPERT_NAMES}),
    attention="block_causal",
    mask_in_softmax=True,
    mask_token_id=156895,
    eos_token_id=156892,
    aliases=("llada2_moe_veomni",),
)
