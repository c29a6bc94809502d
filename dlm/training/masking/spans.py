"""Random masking, with runs of neighbouring tokens in a share of the sequences: what a model that fills holes meets.

Under random masking alone a hole of ten tokens in a text that is otherwise whole hardly ever occurs.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from dlm.diffusion.loss import token_weights
from dlm.diffusion.noise import Noised
from dlm.diffusion.rng import Purpose, uniform
from dlm.training.batch import Batch
from dlm.training.masking.random import RandomMasking
from dlm.training.masking.view import View

SEQUENCE, CUT, RUN = range(3)
"""Purpose SPAN's `token`: has the sequence runs, how many of them are masked, how long are they; does one begin here; is it masked."""


class SpanMasking(RandomMasking):
    """A sequence has runs with probability `span_share`; the others are as in `RandomMasking`.

    Each run is masked with probability t ~ U(0, `span_level`). Lengths are geometric, their mean in a sequence is
    `span_length`^u with u ~ U(0, 1): a hole that is half filled is a shorter one, so that short ones count more often. A
    token counts 2 / span_level, one over the mean of t, which is a training weight and makes no bound.
    """

    def _view(self, batch: Batch, noised: Noised, weight: Float[Tensor, "b l"]) -> View:
        c, at = self.config, torch.arange(batch.input_ids.shape[1], device=batch.index.device)
        draw = partial(uniform, Purpose.SPAN, seed=self.seed, sample=batch.index[:, None], step=batch.step)
        chosen, level, long = draw(position=torch.arange(3, device=at.device), token=SEQUENCE).split(1, dim=1)
        begins = draw(position=at, token=CUT) * c.span_length**long < 1
        start = (at * begins).cummax(dim=1).values
        masked = (draw(position=start, token=RUN) < level * c.span_level) & batch.answer
        spans = chosen < c.span_share
        masked = torch.where(spans, masked, noised.masked)
        counts = token_weights(torch.full_like(weight, 2 / c.span_level), batch.answer, batch.samples)
        shown = torch.where(masked, self.mask_id, batch.input_ids)
        return super()._view(batch, Noised(shown, masked, noised.weight), torch.where(spans, counts, weight))
