"""Plain autoregressive training: nothing is masked, each token is predicted from those before it."""

import torch

from dlm.diffusion.bound import moved_right
from dlm.diffusion.loss import token_weights
from dlm.models.attention import AttentionSpec
from dlm.models.config import ModelConfig
from dlm.training.batch import Batch
from dlm.training.masking.view import View, documents, end_of
from dlm.training.sections import ObjectiveConfig


class CausalMasking:
    """The likelihood itself: -log p(x_i | end-of-text, x_<i) for every token of the answer, the first one included."""

    work = 1.0, 1.0

    def __init__(self, config: ObjectiveConfig, model: ModelConfig, seed: int) -> None:
        self.eos_id, self.apart = end_of(model), config.documents == "apart"

    def views(self, batch: Batch) -> list[View]:
        """One view: the sequence moved one to the right, behind an end-of-text."""
        seen = moved_right(batch.input_ids, self.eos_id)
        weight = token_weights(torch.ones_like(seen[:, :1], dtype=torch.float32), batch.answer, batch.samples)
        positions = documents(seen, self.eos_id, opens=True) if self.apart else None
        attention = AttentionSpec("causal", apart=self.apart)
        return [View(seen, batch.input_ids, batch.answer, weight, attention, positions, shifted=False)]
