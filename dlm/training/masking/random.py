"""Tokens masked independently at a random level: LLaDA's and MDLM's objective, and its complementary form."""

import torch
from jaxtyping import Float
from torch import Tensor

from dlm.diffusion.loss import token_weights
from dlm.diffusion.noise import Noised, mask_probability, mask_tokens
from dlm.diffusion.rng import Purpose, uniform
from dlm.models.attention import AttentionSpec
from dlm.models.config import ModelConfig
from dlm.training.batch import Batch
from dlm.training.masking.view import View, documents, end_of
from dlm.training.sections import ObjectiveConfig


class RandomMasking:
    """Each sequence has a noise level t ~ U(0, 1); each token of its answer is masked with probability t (LLaDA eq. 3;
    MDLM eq. 10).

    With prompt masks this is LLaDA's SFT objective.
    """

    work = 1.0, 0.5
    complements: tuple[bool, ...] = (False,)
    """One forward for each entry: on the mask, or on its complement."""
    block_length: int | None = None
    """Tokens that share a noise level; none: all of a sequence."""

    def __init__(self, config: ObjectiveConfig, model: ModelConfig, seed: int) -> None:
        assert model.mask_token_id is not None
        self.config, self.model, self.mask_id, self.seed = config, model, model.mask_token_id, seed

    def views(self, batch: Batch) -> list[View]:
        """One view, or two whose masks are complements of each other."""
        c = self.config
        if batch.answer.all() and c.truncate_probability and self.block_length is None:
            batch = self._truncate(batch)
        length = batch.input_ids.shape[1]
        p = mask_probability(
            batch.index,
            seed=self.seed,
            step=batch.step,
            antithetic=c.antithetic,
            batch=batch.samples,
            blocks=-(-length // (self.block_length or length)),
            low=c.t_min,
            high=c.t_max,
        )
        views = []
        for complementary in self.complements:
            noised = mask_tokens(
                batch.input_ids,
                batch.index,
                self.mask_id,
                seed=self.seed,
                step=batch.step,
                maskable=batch.answer,
                probability=p,
                block_length=self.block_length,
                exact_count=c.exact_count,
                complementary=complementary,
            )
            # 2 is 1/p at the mean noise level: the scale of `uniform`, which is a training weight and not a bound
            weight = noised.weight if c.weighting == "bound" else torch.full_like(noised.weight, 2.0)
            weight = token_weights(weight, batch.answer, batch.samples) / len(self.complements)
            views.append(self._view(batch, noised, weight))
        return views

    def _view(self, batch: Batch, noised: Noised, weight: Float[Tensor, "b l"]) -> View:
        attention = positions = None
        if self.config.documents == "apart":
            attention = AttentionSpec(self.model.attention, self.model.block_length, apart=True)
            # A shifted network predicts a document's first token from the end-of-text before it, so that belongs to the
            # document.
            positions = documents(batch.input_ids, end_of(self.model), opens=self.model.shifted_logits)
        return View(noised.input_ids, batch.input_ids, noised.masked, weight, attention, positions)

    def _truncate(self, batch: Batch) -> Batch:
        """One step in a hundred sees sequences of a random length (LLaDA, appendix B.1), the same in every process."""
        draw = uniform(Purpose.LENGTH, seed=self.seed, step=batch.step, position=torch.arange(2))
        if draw[0] >= self.config.truncate_probability:
            return batch
        return batch.until(1 + int(draw[1] * batch.input_ids.shape[1]))


class ComplementaryMasking(RandomMasking):
    """Two forwards a step, the second with the complement of the first one's mask: every token is predicted."""

    work = 2.0, 1.0
    complements = (False, True)
