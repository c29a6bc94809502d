"""Fast-dLLM v2 (arXiv 2509.26328): Qwen2 under block-causal attention."""

from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.qwen2 import read_qwen2, write_qwen2
from dlm.models.families.shape import QWEN_NAMES, Fields
from dlm.models.settings import Settings


def read_fast_dllm(hub: Settings) -> Fields:
    """Fast-dLLM v2 (arXiv 2509.26328): Qwen2 under block-causal attention."""
    hub.only("use_relay", False)
    return {**read_qwen2(hub), "block_length": hub.size("bd_size", default=32)}


def write_fast_dllm(config: ModelConfig) -> Fields:
    return {**write_qwen2(config), "bd_size": config.block_length}


FAMILY = Family(
    "Fast_dLLM_QwenForCausalLM",
    read_fast_dllm,
    write_fast_dllm,
    (QWEN_NAMES,),
    attention="block_causal",
    shifted_logits=True,
    mask_in_softmax=True,
    mask_token_id=151665,
    eos_token_id=151645,
)
