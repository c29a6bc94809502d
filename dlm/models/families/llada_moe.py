"""LLaDA-MoE: a mixture of experts that sees both ways."""

import reprlib

from dlm.errors import UserError
from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.shape import EXPERT_NAMES, QWEN_NAMES, Fields, mixture_of, read_shape, write_shape
from dlm.models.settings import Settings


def read_llada_moe(hub: Settings) -> Fields:
    """LLaDA-MoE: softmax router without normalisation; a list says which layers are sparse."""
    hub.only("moe_router_enable_expert_bias", False)
    hub.only("moe_router_score_function", "softmax")
    hub.only("shared_expert_intermediate_size", 0, -1)
    hub.only("clip_qkv")
    fields = read_shape(hub)
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


def write_llada_moe(config: ModelConfig) -> Fields:
    moe = mixture_of(config, "llada_moe")
    return {
        **write_shape(config),
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


FAMILY = Family(
    "LLaDAMoEModelLM",
    read_llada_moe,
    write_llada_moe,
    ({**QWEN_NAMES, **EXPERT_NAMES},),
    mask_in_softmax=True,
    mask_token_id=156895,
    aliases=("lladamoe",),
)
