"""Plain autoregressive training: nothing is masked, each token is predicted from those before it."""

import torch

from dlm.diffusion.bound import moved_right
from dlm.diffusion.loss import token_weights
from dlm.errors import UserError
from dlm.models.attention import AttentionSpec
from dlm.models.config import ModelConfig
from dlm.training.batch import Batch
from dlm.training.masking.view import View
from dlm.training.sections import ObjectiveConfig


class CausalMasking:
    """The likelihood itself: -log p(x_i | end-of-text, x_<i) for every token of the answer, the first one included."""

    def __init__(self, config: ObjectiveConfig, model: ModelConfig, seed: int) -> None:
        if model.eos_token_id is None:
            raise UserError(
                "objective.masking = causal predicts the first token from end-of-text, and the model has none: "
                "set model.eos_token_id, or take a tokenizer that has one"
            )
        self.eos_id = model.eos_token_id

    def views(self, batch: Batch) -> list[View]:
        """One view: the sequence moved one to the right, behind an end-of-text."""
        seen = moved_right(batch.input_ids, self.eos_id)
        weight = token_weights(torch.ones_like(seen[:, :1], dtype=torch.float32), batch.answer, batch.samples)
        return [View(seen, batch.input_ids, batch.answer, weight, AttentionSpec("causal"), shifted=False)]
