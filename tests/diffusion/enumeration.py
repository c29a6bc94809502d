"""Every mask of a short sequence, and what a network says under each: the oracle of the loss and the bound."""

from itertools import product
from math import factorial

import numpy as np
import torch

from dlm.models import ModelConfig, Transformer

VOCAB, LENGTH, MASK = 5, 4, 4


def tiny_network(**changes) -> Transformer:
    shape = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 12}
    shape |= {"mask_token_id": MASK, "initializer_range": 0.7}
    network = Transformer(ModelConfig(**{**shape, **changes}))
    network.initialise(torch.Generator().manual_seed(0))
    return network.eval()


def masked_nats(network: Transformer, ids: list[int]) -> dict[tuple[bool, ...], float]:
    """For each non-empty mask: the summed cross-entropy of the masked tokens, by numpy from raw logits."""
    table = {}
    for mask in product([False, True], repeat=len(ids)):
        if not any(mask):
            continue
        noisy = [MASK if m else i for m, i in zip(mask, ids, strict=True)]
        with torch.no_grad():
            logits = network(torch.tensor([noisy]))[0].double().numpy()
        logits[:, MASK] = -np.inf
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        table[mask] = -sum(log_p[i, token] for i, token in enumerate(ids) if mask[i])
    return table


def autoregressive_nats(network: Transformer, ids: list[int], start: int) -> float:
    """-log p of the tokens one after the other, behind the token `start`; the network's state at i predicts i + 1."""
    return sum(_next(network, [start, *ids[:i]])[token] for i, token in enumerate(ids))


def _next(network: Transformer, shown: list[int]) -> np.ndarray:
    with torch.no_grad():
        row = network(torch.tensor([shown]))[0, -1].double().numpy()
    row[MASK] = -np.inf
    return np.log(np.exp(row).sum()) - row


def block_nats(network: Transformer, ids: list[int], block_length: int) -> list[dict[tuple[bool, ...], float]]:
    """`masked_nats` of each block given the clean text before it, each mask in a forward of its own."""
    tables = []
    for start in range(0, len(ids), block_length):
        before, block = ids[:start], ids[start : start + block_length]
        table = {}
        for mask in product([False, True], repeat=len(block)):
            if any(mask):
                shown = [*before, *(MASK if m else i for m, i in zip(mask, block, strict=True))]
                with torch.no_grad():
                    logits = network(torch.tensor([shown]))[0].double().numpy()
                logits[:, MASK] = -np.inf
                nats = np.log(np.exp(logits).sum(-1, keepdims=True)) - logits
                rows = [max(0, start + i - network.config.shifted_logits) for i in range(len(block))]
                table[mask] = sum(nats[row, token] for row, token, m in zip(rows, block, mask, strict=True) if m)
        tables.append(table)
    return tables


def exact_bound(table: dict[tuple[bool, ...], float], length: int) -> float:
    """sum over masks of (k-1)! (L-k)! / L! times its nats: both estimators' expectation, integrated in closed form."""
    return sum(
        factorial(sum(m) - 1) * factorial(length - sum(m)) / factorial(length) * nats for m, nats in table.items()
    )


def exact_loss(table: dict[tuple[bool, ...], float], length: int, epsilon: float = 1e-3) -> float:
    """(1/L) E_t sum_masks p^k (1-p)^(L-k) nats / p with p = (1-eps) t + eps, by the midpoint rule."""
    t = (np.arange(200_000) + 0.5) / 200_000
    p = (1 - epsilon) * t + epsilon
    return sum(np.mean(p ** (sum(m) - 1) * (1 - p) ** (length - sum(m))) * nats for m, nats in table.items()) / length
