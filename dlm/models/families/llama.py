"""Llama: causal; one switch for all attention biases, one for the feed-forward's."""

from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.shape import QWEN_NAMES, Fields, read_shape, write_shape
from dlm.models.settings import Settings


def read_llama(hub: Settings, context: int = 2048) -> Fields:
    """One switch for all attention biases, one for the feed-forward's."""
    bias = hub.get("attention_bias", default=False)
    fields = {**read_shape(hub, context), "intermediate_size": hub.size("intermediate_size")}
    fields |= {"qkv_bias": bias, "o_bias": bias}
    return {**fields, "mlp_bias": hub.get("mlp_bias", default=False)}


def write_llama(config: ModelConfig) -> Fields:
    fields = {**write_shape(config), "intermediate_size": config.intermediate_size}
    return {**fields, "attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}


FAMILY = Family("LlamaForCausalLM", read_llama, write_llama, (QWEN_NAMES,), attention="causal", shifted_logits=True)
