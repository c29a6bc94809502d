"""Speculative sampling: tokens drawn from a draft's distribution q become tokens of the target's distribution p.

Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.diffusion.choose import Address
from dlm.diffusion.rng import Purpose, uniform


@dataclass(frozen=True)
class Drawn:
    """What n drafted tokens were drawn from."""

    p: Float[Tensor, "n k"]
    """Probabilities of the tokens that could be drawn."""
    tokens: Int[Tensor, "n k"] | None = None
    """Which tokens these are; None: the whole vocabulary."""

    def dense(self, vocab_size: int) -> Float[Tensor, "n v"]:
        """Probabilities of all tokens."""
        if self.tokens is None:
            return self.p
        return self.p.new_zeros(len(self.p), vocab_size).scatter_add_(-1, self.tokens, self.p)

    def rows(self, index: slice) -> "Drawn":
        """Some of them."""
        return Drawn(self.p[index], None if self.tokens is None else self.tokens[index])


def draw(p: Float[Tensor, "n k"], purpose: Purpose, address: Address) -> Int[Tensor, " n"]:
    """One column of each row, with probability p (a row need not sum to 1), by one addressed number."""
    total = p.double().cumsum(-1)
    point = uniform(purpose, **vars(address))[:, None] * total[:, -1:]
    found = torch.searchsorted(total, point, right=True)[:, 0]
    return found.clamp_max(p.shape[-1] - 1)


def judge(p: Float[Tensor, "n v"], q: Drawn, drafted: Int[Tensor, " n"], address: Address) -> Int[Tensor, " n"]:
    """The target's token of each row: the drafted one, kept with probability min(1, p/q), else a draw from (p - q)+.

    If `drafted` ~ q then the result ~ p, and it differs from `drafted` wherever that was not kept.
    """
    dense = q.dense(p.shape[-1])
    p_of, q_of = (x.gather(-1, drafted[:, None])[:, 0] for x in (p, dense))
    kept = uniform(Purpose.ACCEPT, **vars(address)) * q_of < p_of
    residual = (p - dense).clamp_min(0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return torch.where(kept, drafted, draw(residual, Purpose.RESIDUAL, address))
