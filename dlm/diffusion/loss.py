"""The masked-diffusion loss. Knows nothing of models: it is given logits of the masked positions."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Weighting = Literal["bound", "uniform"]


def token_losses(logits: Float[Tensor, "n v"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Cross-entropy of each masked token in nats, in fp32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def masked_diffusion_loss(
    logits: Float[Tensor, "n v"],
    targets: Int[Tensor, "b l"],
    masked: Bool[Tensor, "b l"],
    weight: Float[Tensor, "b 1"],
    *,
    lengths: Int[Tensor, " b"],
    samples: int,
    weighting: Weighting = "bound",
) -> Float[Tensor, ""]:
    """This process's share of (1/samples) * sum_b (1/lengths_b) * sum_masked CE / p  (LLaDA eq. 3; MDLM eq. 10).

    `logits` are the rows of `masked`, in row-major order. `samples` is the *global* number of sequences in the
    optimiser step and `lengths` each sequence's number of maskable tokens (pre-training: L; SFT: the answer's length,
    padding end-of-text counted), so shares add up to the same loss however the batch is split.
    `weighting='uniform'` replaces 1/p by 2, its value at the mean noise level: a training weight, not a bound.
    """
    losses = token_losses(logits, targets[masked])
    scale = weight if weighting == "bound" else torch.full_like(weight, 2.0)
    per_token = (scale / (lengths.unsqueeze(-1).clamp(min=1) * samples)).expand_as(masked)
    return (losses * per_token[masked]).sum()
