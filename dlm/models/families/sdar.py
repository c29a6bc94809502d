"""SDAR (arXiv 2510.06303): Qwen3 under block-causal attention."""

from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.qwen3 import read_qwen3, write_qwen3
from dlm.models.families.shape import QWEN_NAMES, Fields
from dlm.models.settings import Settings


def read_sdar(hub: Settings) -> Fields:
    """SDAR (arXiv 2510.06303): Qwen3 under block-causal attention."""
    return {**read_qwen3(hub), "block_length": hub.size("block_size", default=4)}


def write_sdar(config: ModelConfig) -> Fields:
    fused = {"fuse_cross_entropy": True}  # the published code needs this key
    return {**write_qwen3(config), **fused, "block_size": config.block_length}


FAMILY = Family(
    "SDARForCausalLM",
    read_sdar,
    write_sdar,
    (QWEN_NAMES,),
    attention="block_causal",
    mask_in_softmax=True,
    mask_token_id=151669,
)
