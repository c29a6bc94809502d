"""Forward masking: which tokens a training sample loses. Knows nothing of models."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.rng import Purpose, uniform

EPSILON = 1e-3


@dataclass(frozen=True)
class Noised:
    """A corrupted batch: what the network sees, where it is asked, and each token's weight 1/p in the bound."""

    input_ids: Int[Tensor, "b l"]
    masked: Bool[Tensor, "b l"]
    weight: Float[Tensor, "b 1"]


def mask_probability(
    index: Int[Tensor, " b"], *, seed: int, step: int, antithetic: bool = False, batch: int = 0
) -> Float[Tensor, "b 1"]:
    """p = (1 - eps) t + eps with t ~ U(0, 1) for each sample (LLaDA, section 2.2).

    `antithetic` spreads the t of one global batch of size `batch` evenly: t = (u + index/batch) mod 1 with one
    shared u, which keeps each t uniform and lowers the variance of the batch's loss (MDLM, Kingma et al.).
    """
    if antithetic:
        t = (uniform(Purpose.TIME, seed=seed, step=step) + (index % batch).double() / batch) % 1.0
    else:
        t = uniform(Purpose.TIME, seed=seed, sample=index, step=step)
    return ((1 - EPSILON) * t + EPSILON).float().unsqueeze(-1).to(index.device)


def mask_tokens(
    input_ids: Int[Tensor, "b l"],
    index: Int[Tensor, " b"],
    mask_id: int,
    *,
    seed: int,
    step: int,
    maskable: Bool[Tensor, "b l"] | None = None,
    probability: Float[Tensor, "b 1"] | None = None,
    exact_count: bool = False,
    complementary: bool = False,
) -> Noised:
    """Mask each maskable token with its sample's probability, by addressed random numbers.

    `index` is each sample's global number, so the masks are the same however the batch is split. `exact_count`
    masks exactly round(p * maskable) tokens (at least one) instead, the ones with the smallest numbers.
    `complementary` masks the other tokens: call twice to see every token predicted once.
    """
    b, l = input_ids.shape
    if maskable is None:
        maskable = torch.ones_like(input_ids, dtype=torch.bool)
    p = mask_probability(index, seed=seed, step=step) if probability is None else probability
    position = torch.arange(l, device=input_ids.device)
    number = uniform(Purpose.MASK, seed=seed, sample=index[:, None], step=step, position=position)
    if exact_count:
        total = maskable.sum(-1, keepdim=True)
        count = (p * total).round().long().clamp(min=1)
        rank = number.masked_fill(~maskable, 2.0).argsort(-1).argsort(-1)
        masked, p = (rank < count) & maskable, count / total.clamp(min=1)
    else:
        masked = (number < p) & maskable
    if complementary:
        masked, p = maskable & ~masked, 1 - p
    return Noised(torch.where(masked, mask_id, input_ids), masked, 1 / p.float().clamp(min=EPSILON))
