"""Forward masking: which tokens a training sample loses."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.rng import Purpose, uniform

EPSILON = 1e-3


@dataclass(frozen=True)
class Noised:
    """A corrupted batch: the network's input, the positions it predicts, and each token's weight 1/p in the bound."""

    input_ids: Int[Tensor, "b l"]
    masked: Bool[Tensor, "b l"]
    weight: Float[Tensor, "b l"]


def by_block(x: Tensor, block_length: int, fill: bool | float = 0) -> Tensor:
    """(b, l) as (b, n, block_length), its last block filled up."""
    return F.pad(x, (0, -x.shape[1] % block_length), value=fill).unflatten(1, (-1, block_length))


def mask_probability(
    index: Int[Tensor, " b"],
    *,
    seed: int,
    step: int,
    antithetic: bool = False,
    batch: int = 0,
    blocks: int = 1,
    low: float = EPSILON,
    high: float = 1.0,
) -> Float[Tensor, "b n"]:
    """p = low + (high - low) t with t ~ U(0, 1) for each block of each sample (LLaDA, section 2.2; BD3-LM).

    `antithetic` spreads the t of one global batch of size `batch` evenly: t = (u + (block + index/batch)/blocks) mod 1
    with one shared u, which keeps each t uniform and lowers the variance of the batch's loss (MDLM, Kingma et al.); the
    blocks of one sample lie as far apart as they can.
    """
    block = torch.arange(blocks, device=index.device)
    if antithetic:
        place = (block + (index[:, None] % batch).double() / batch) / blocks
        t = (uniform(Purpose.TIME, seed=seed, step=step).to(index.device) + place) % 1.0
    else:
        t = uniform(Purpose.TIME, seed=seed, sample=index[:, None], step=step, position=block)
    return ((high - low) * t + low).float()


def mask_tokens(
    input_ids: Int[Tensor, "b l"],
    index: Int[Tensor, " b"],
    mask_id: int,
    *,
    seed: int,
    step: int,
    maskable: Bool[Tensor, "b l"] | None = None,
    probability: Float[Tensor, "b n"] | None = None,
    block_length: int | None = None,
    exact_count: bool = False,
    complementary: bool = False,
) -> Noised:
    """Mask each maskable token with the probability of its block, by addressed random numbers; `block_length=None` is one block.

    `index` is each sample's global number, so the masks are the same however the batch is split. `exact_count`
    masks exactly round(p * maskable) tokens of a block (at least one) instead, the ones with the smallest numbers.
    `complementary` masks the other tokens: call twice to see every token predicted once.
    """
    b, l = input_ids.shape
    size = block_length or l
    if maskable is None:
        maskable = torch.ones_like(input_ids, dtype=torch.bool)
    if probability is None:
        probability = mask_probability(index, seed=seed, step=step, blocks=-(-l // size))
    position = torch.arange(l, device=input_ids.device)
    number = uniform(Purpose.MASK, seed=seed, sample=index[:, None], step=step, position=position)
    number, free, p = by_block(number, size), by_block(maskable, size), probability.unsqueeze(-1)
    if exact_count:
        total = free.sum(-1, keepdim=True)
        count = (p * total).round().long().clamp(min=1)
        masked, p = smallest(number, free, count), count / total.clamp(min=1)
    else:
        masked = (number < p) & free
    if complementary:
        masked, p = free & ~masked, 1 - p
    weight = (1 / p.float().clamp(min=EPSILON)).expand(masked.shape)
    masked, weight = masked.flatten(1)[:, :l], weight.flatten(1)[:, :l]
    return Noised(torch.where(masked, mask_id, input_ids), masked, weight)


def smallest(number: Float[Tensor, "*b l"], among: Bool[Tensor, "*b l"], count: Int[Tensor, "*b 1"]) -> Tensor:
    """Which `count` of the numbers `among` are the smallest; all of them where there are fewer."""
    return (number.masked_fill(~among, 2.0).argsort(-1).argsort(-1) < count) & among
