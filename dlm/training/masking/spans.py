"""Random masking, with runs of neighbouring tokens in a share of the sequences: what a model that fills holes meets.

Under random masking alone a hole of ten tokens in a text that is otherwise whole hardly ever occurs.
"""

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
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
    `span_length`^u with u ~ U(0, 1): a hole that is half filled is a shorter one, so that short ones count more often.
    Tokens count 2 / span_level on average, one over the mean of t, and those d places from what is shown d^-span_edges as
    much as those beside it: the ends of a hole are what decoding asks for first. These weights make no bound.
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
        counts = _places(masked).to(weight.dtype) ** -c.span_edges * masked
        counts = counts * (2 / c.span_level * masked.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1e-9))
        counts = token_weights(counts, batch.answer, batch.samples)
        shown = torch.where(masked, self.mask_id, batch.input_ids)
        return super()._view(batch, Noised(shown, masked, noised.weight), torch.where(spans, counts, weight))


def _places(masked: Bool[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """How far each position is from the nearest that is not masked; at least 1."""
    length = masked.shape[1]
    at = torch.arange(length, device=masked.device).expand_as(masked)
    left = at - at.masked_fill(masked, -length).cummax(dim=1).values
    right = at.masked_fill(masked, 2 * length).flip(1).cummin(dim=1).values.flip(1) - at
    return torch.minimum(left, right).clamp(1, length)
