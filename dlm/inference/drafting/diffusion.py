"""Drafter `diffusion`: a masked diffusion model of the same tokenizer fills the next positions (SpecDiff).

Christopher et al., "Speculative Diffusion Decoding" (arXiv 2408.05636). All positions are filled by one forward: what
several drew one after the other would not be drawn from a distribution that `verify = "reject"` could check against.
"""

from collections.abc import Sequence as Sized

import numpy as np
import torch
from torch import Tensor

from dlm.inference.drafting.choosing import Choosing
from dlm.inference.drafting.drafter import Guess, Plain, Wish
from dlm.inference.transfers import Transfers
from dlm.models.lm import LM


class Diffusion(Plain):
    """Reads the whole text so far, up to its own context, and as many masks as tokens are wished for. Keeps no keys."""

    name = "diffusion"
    most = 15

    def __init__(self, lm: LM) -> None:
        self.lm, self.mask, self.transfers = lm, lm.require_mask_id(), Transfers(lm.device)
        if (rope := lm.network.rope) is not None:
            lm.network.rope = rope[0].to(lm.device), rope[1]  # once: each forward would wait for it

    def propose(self, wishes: Sized[Wish]) -> list[Guess]:
        choosing = Choosing(wishes)
        limit = self.lm.config.context_length
        texts = [wish.sequence.canvas.tokens[: wish.anchor + 1][-(limit - wish.count) :] for wish in wishes]
        longest = max(len(text) + wish.count for text, wish in zip(texts, wishes, strict=True))
        ids = np.full((len(wishes), longest), self.mask, np.int64)
        valid, rows = np.zeros(ids.shape, bool), np.zeros(ids.shape, bool)
        for i, (text, wish) in enumerate(zip(texts, wishes, strict=True)):
            ids[i, : len(text)] = text
            valid[i, : len(text) + wish.count] = True
            rows[i, len(text) : len(text) + wish.count] = True
        x = self.transfers.up({"ids": ids, "valid": valid, "at": np.flatnonzero(rows), **choosing.arrays})
        network = self.lm.network
        states = network.attention.states(network.hidden(x["ids"], valid=x["valid"]), network.config.shifted_logits)
        states = states.flatten(0, 1).index_select(0, x["at"])
        logits = network.suppress(network.head(states), always=True).float()
        size = wishes[0].sequence.config.vocab_size
        logits = logits[:, :size] if logits.shape[-1] >= size else _padded(logits, size)
        return choosing.guesses(states, logits, x)


def _padded(logits: Tensor, size: int) -> Tensor:
    """Tokens that the draft does not have are impossible for it."""
    return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=float("-inf"))
