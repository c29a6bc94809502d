"""Qwen2: causal, with biases on q, k and v."""

from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.shape import QWEN_NAMES, Fields, read_shape, write_shape
from dlm.models.settings import Settings


def read_qwen2(hub: Settings) -> Fields:
    """Biases on q, k and v; also the shape of Dream and Fast-dLLM v2."""
    return {**read_shape(hub, 32_768), "intermediate_size": hub.size("intermediate_size"), "qkv_bias": True}


def write_qwen2(config: ModelConfig) -> Fields:
    return {**write_shape(config), "intermediate_size": config.intermediate_size, "use_sliding_window": False}


FAMILY = Family("Qwen2ForCausalLM", read_qwen2, write_qwen2, (QWEN_NAMES,), attention="causal", shifted_logits=True)
