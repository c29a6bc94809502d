"""An autoregressive network as a diffusion model, by its configuration alone. Knows no training."""

from dlm.models.attention import AttentionSpec
from dlm.models.config import AttentionKind
from dlm.models.lm import LM


def convert(lm: LM, attention: AttentionKind, block_length: int | None = None) -> None:
    """Change who sees whom, in place; weights, and the shift between a position and what it predicts, stay.

    A checkpoint whose family cannot say so is saved as family `dlm`.
    """
    config = lm.config.model_copy(update={"attention": attention, "block_length": block_length})
    lm.network.config, lm.network.attention = config, AttentionSpec.of(config)
