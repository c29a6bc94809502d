"""Qwen3: as Llama, with head norms."""

from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.llama import read_llama, write_llama
from dlm.models.families.shape import QWEN_NAMES, Fields
from dlm.models.settings import Settings


def read_qwen3(hub: Settings) -> Fields:
    """As llama, with head norms."""
    return {**read_llama(hub, 32_768), "qk_norm": True}


def write_qwen3(config: ModelConfig) -> Fields:
    return {**write_llama(config), "use_sliding_window": False}


FAMILY = Family("Qwen3ForCausalLM", read_qwen3, write_qwen3, (QWEN_NAMES,), attention="causal", shifted_logits=True)
