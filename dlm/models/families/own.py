"""`dlm`: our own configuration, which says everything that a network of ours has."""

from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.shape import QWEN_NAMES, Fields
from dlm.models.settings import Settings


def read_dlm(hub: Settings) -> Fields:
    """Our own configuration is our own spelling; keys that transformers adds are not ours."""
    fields = {key: value for key, value in hub.values.items() if key in ModelConfig.model_fields}
    fields |= {"vocab_size": hub.size("vocab_size")}
    return fields | hub.rope() if "rope_parameters" in hub.values else fields


def write_dlm(config: ModelConfig) -> Fields:
    return config.model_dump(mode="json")


FAMILY = Family("DLMForMaskedLM", read_dlm, write_dlm, (QWEN_NAMES,))
