"""`dlm`: our own family, whose configuration can describe every network of ours."""

from dlm.models.config import ModelConfig
from dlm.models.families.family import Family
from dlm.models.families.shape import QWEN_NAMES, Fields
from dlm.models.settings import Settings


def read_dlm(hub: Settings) -> Fields:
    """The fields of our own configuration; keys that transformers adds are left out."""
    fields = {key: value for key, value in hub.values.items() if key in ModelConfig.model_fields}
    fields |= {"vocab_size": hub.size("vocab_size")}
    return fields | hub.rope() if "rope_parameters" in hub.values else fields


def write_dlm(config: ModelConfig) -> Fields:
    return config.model_dump(mode="json")


FAMILY = Family("DLMForMaskedLM", read_dlm, write_dlm, (QWEN_NAMES,))
