"""Losses of single tokens, and the weight of each in a batch."""

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def token_losses(logits: Float[Tensor, "n v"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Cross-entropy of each token in nats, in fp32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def token_entropies(logits: Float[Tensor, "n v"], temperature: float) -> Float[Tensor, " n"]:
    """Entropy of softmax(logits / temperature) in nats, in fp32; minus infinity is a token of no probability."""
    log_p = (logits.float() / temperature).log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(-1)


def token_weights(weight: Float[Tensor, "b _"], answer: Bool[Tensor, "b l"], samples: int) -> Float[Tensor, "b l"]:
    """weight / (length_b * samples): what a token's cross-entropy counts in the mean of a global batch.

    `samples` is the *global* number of sequences in the optimiser step and length_b the number of tokens in the
    sequence's answer (pre-training: L; SFT: padding end-of-text counted), so that shares add up to the same loss however
    the batch is split. With weight = 1/p on masked tokens the sum is (1/samples) sum_b (1/length_b) sum_masked CE / p
    (LLaDA eq. 3; MDLM eq. 10).
    """
    return (weight / (answer.sum(-1, keepdim=True).clamp(min=1) * samples)).expand(answer.shape)
