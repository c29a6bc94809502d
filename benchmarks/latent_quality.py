"""What samples are worth without a question: a judge's bits a byte, beside entropy and repetition, and BrierLM."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm.models.lm import LM

Texts = Sequence[Sequence[int]]


def figures(judge: "LM", texts: Texts, real: Texts) -> dict[str, Any]:
    """Of samples: the judge's bits a token, entropy of their own tokens, distinct 4-grams, repetition, BrierLM."""
    texts = [list(text) for text in texts if text]
    tokens = sum(map(len, texts))
    return {
        "judged": sum(nats(judge, text) for text in texts) / tokens / math.log(2),
        "entropy": sum(entropy(text) * len(text) for text in texts) / tokens / math.log(2),
        "distinct": distinct(texts),
        "repetition": sum(repetition(text) * len(text) for text in texts) / tokens,
        "brier": brier(texts, real),
    }


def nats(judge: "LM", text: Sequence[int]) -> float:
    """-log p of a text under an autoregressive model, from end-of-text."""
    import torch

    from dlm.training.scoring import sequence_nats

    with torch.no_grad():
        return float(sequence_nats(judge.network, torch.tensor([list(text)]))[0, 0])


def entropy(text: Sequence[int]) -> float:
    """Nats of a text's own tokens."""
    return sum(-c / len(text) * math.log(c / len(text)) for c in Counter(text).values())


def distinct(texts: Texts, n: int = 4) -> float:
    """Share of the n-grams of all texts that differ."""
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def repetition(text: Sequence[int], n: int = 4) -> float:
    """Share of a text's n-grams that stood in it before."""
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def brier(texts: Texts, real: Texts, most: int = 4) -> float:
    """100 · (Π_{n ≤ 4} E[1(x₁ = y) + 1(x₂ = y) - 1(x₁ = x₂)])^¼ over n-grams anywhere in a sample or a real text.

    CALM's (arXiv 2510.27688) of unconditional samples: each expectation is 1 - the Brier distance of the two
    distributions of n-grams plus a constant of the real one, so it can be below 0, and then counts as 0.
    """
    product = 1.0
    for n in range(1, most + 1):
        ours, theirs = (
            Counter(tuple(t[i : i + n]) for t in each for i in range(len(t) - n + 1)) for each in (texts, real)
        )
        size, other = sum(ours.values()), sum(theirs.values())
        same_as_real = sum(count * theirs[gram] for gram, count in ours.items()) / (size * other)
        same_as_own = sum(count * (count - 1) for count in ours.values()) / (size * (size - 1))
        product *= max(0.0, 2 * same_as_real - same_as_own)
    return 100 * product**0.25
