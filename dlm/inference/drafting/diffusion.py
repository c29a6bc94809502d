"""Drafter `diffusion`: a masked diffusion model of the same tokenizer fills the next positions (SpecDiff).

Christopher et al., "Speculative Diffusion Decoding" (arXiv 2408.05636). All positions are filled by one forward: what
several drew one after the other would not be drawn from a distribution that `verify = "reject"` could check against.
"""

from collections.abc import Sequence as Sized

import numpy as np
import torch
from torch import Tensor

from dlm.diffusion.choose import argmax, choose, distribution
from dlm.diffusion.rng import Purpose
from dlm.diffusion.speculate import Drawn, draw
from dlm.inference.drafting.addresses import addresses
from dlm.inference.drafting.drafter import Guess, Plain, Wish
from dlm.models.lm import LM


class Diffusion(Plain):
    """Reads the whole text so far, up to its own context, and as many masks as tokens are wished for. Keeps no keys."""

    name = "diffusion"
    most = 15

    def __init__(self, lm: LM) -> None:
        self.lm, self.mask = lm, lm.require_mask_id()

    def propose(self, wishes: Sized[Wish]) -> list[Guess]:
        limit = self.lm.config.context_length
        texts = [wish.sequence.canvas.tokens[: wish.anchor + 1][-(limit - wish.count) :] for wish in wishes]
        longest = max(len(text) + wish.count for text, wish in zip(texts, wishes, strict=True))
        ids = np.full((len(wishes), longest), self.mask, np.int64)
        valid, rows = np.zeros(ids.shape, bool), np.zeros(ids.shape, bool)
        for i, (text, wish) in enumerate(zip(texts, wishes, strict=True)):
            ids[i, : len(text)] = text
            valid[i, : len(text) + wish.count] = True
            rows[i, len(text) : len(text) + wish.count] = True
        given = [torch.from_numpy(x).to(self.lm.device) for x in (ids, rows, valid)]
        logits = self.lm.network.suppress(self.lm.predict(given[0], given[1], valid=given[2]), always=True).float()
        size = wishes[0].sequence.config.vocab_size
        logits = logits[:, :size] if logits.shape[-1] >= size else _padded(logits, size)
        guesses, start = [], 0
        for wish in wishes:
            guesses.append(_guess(wish, logits[start : start + wish.count]))
            start += wish.count
        return guesses


def _guess(wish: Wish, logits: Tensor) -> Guess:
    s = wish.sequence.decoding.settings
    if s.temperature == 0:
        return Guess(argmax(logits).cpu().numpy(), forwards=1)
    address = addresses([wish], logits.device)
    if s.verify == "match":
        settings = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
        token = choose(logits, mask_id=None, **settings, address=address, check=False).token
        return Guess(token.cpu().numpy(), forwards=1)
    drawn = Drawn(distribution(logits, s.temperature, s.top_k, s.top_p))
    return Guess(draw(drawn.p, Purpose.DRAFT, address).cpu().numpy(), drawn, forwards=1)


def _padded(logits: Tensor, size: int) -> Tensor:
    """Tokens that the draft does not have are impossible for it."""
    return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=float("-inf"))
