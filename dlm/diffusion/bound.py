"""Likelihood bound: how many nats a masked diffusion model needs at most for a sequence. Knows nothing of models."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.loss import token_losses
from dlm.diffusion.rng import Purpose, uniform

Predict = Callable[[Tensor, Tensor], Tensor]
"""(input_ids (b, l), rows (b, l)) -> logits of those rows (n, v), aligned with the tokens they predict."""


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo estimate of the negative ELBO of whole sequences, in nats, with its standard error."""

    nats: float  # summed over sequences
    error: float  # standard error of `nats`
    tokens: int
    bytes: int | None = None

    @property
    def per_token(self) -> tuple[float, float]:
        return self.nats / self.tokens, self.error / self.tokens

    @property
    def perplexity(self) -> float:
        """An upper bound on the perplexity a token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> tuple[float, float] | None:
        if self.bytes is None:
            return None
        return self.nats / self.bytes / math.log(2), self.error / self.bytes / math.log(2)


@torch.no_grad()
def likelihood_bound(
    predict: Predict,
    input_ids: Int[Tensor, "b l"],
    mask_id: int,
    *,
    answer: Bool[Tensor, "b l"] | None = None,
    index: Int[Tensor, " b"] | None = None,
    samples: int = 1,
    seed: int = 0,
    estimator: Literal["exact_count", "bernoulli"] = "exact_count",
) -> Float[Tensor, "b s"]:
    """`samples` independent unbiased draws of each sequence's NELBO in nats: of `answer` given the rest.

    exact_count: k ~ U{1..L}, k tokens masked, L/k * sum CE (LLaDA eq. 6; half the variance of Bernoulli masks).
    bernoulli: t ~ U(0, 1), each token masked with probability t, (1/t) * sum CE (MDLM eq. 10).
    `exact_count` stratifies k over the draws (k of draw s lies in the s-th of `samples` equal parts), which stays
    unbiased because each sequence's first part is chosen at random.
    """
    b, l = input_ids.shape
    device = input_ids.device
    answer = torch.ones_like(input_ids, dtype=torch.bool) if answer is None else answer
    index = torch.arange(b, device=device) if index is None else index
    length = answer.sum(-1)  # (b,)
    position = torch.arange(l, device=device)
    shift = uniform(Purpose.BOUND, seed=seed, sample=index, token=1).to(device)
    draws = []
    for s in range(samples):
        t = (shift + s / samples) % 1.0  # (b,)
        number = uniform(Purpose.BOUND, seed=seed, sample=index[:, None], step=s, position=position).to(device)
        if estimator == "exact_count":
            count = (t * length).floor().long() + 1
            rank = number.masked_fill(~answer, 2.0).argsort(-1).argsort(-1)
            masked, weight = (rank < count[:, None]) & answer, length / count
        else:
            masked, weight = (number < t[:, None]) & answer, 1 / t
        logits = predict(torch.where(masked, mask_id, input_ids), masked)
        losses = torch.zeros(b, l, dtype=torch.float64, device=device)
        losses[masked] = token_losses(logits, input_ids[masked]).double()
        draws.append(losses.sum(-1) * weight)
    return torch.stack(draws, dim=-1).float()


def estimate(draws: Float[Tensor, "b s"], tokens: int, bytes: int | None = None) -> Estimate:
    """Sum over sequences of the mean over draws.

    The standard error is that of the Monte Carlo draws when there are several (within-sequence variance; for
    stratified draws this is conservative), plus nothing for the choice of sequences, which are what is measured.
    """
    b, s = draws.shape
    variance = draws.double().var(-1).sum() / s if s > 1 else torch.tensor(float("nan"))
    return Estimate(draws.double().mean(-1).sum().item(), variance.sqrt().item(), tokens, bytes)
