"""Likelihood: how many nats a model needs for a sequence, or needs at most under diffusion."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.noise import by_block, smallest
from dlm.diffusion.rng import Purpose, uniform

Nats = Callable[[Tensor, Tensor], Tensor]
"""(input_ids (b, l), asked (b, l)) -> cross-entropy of the sequence's tokens there (n,), given what the ids show."""


@dataclass(frozen=True)
class Estimate:
    """What whole sequences cost in nats, or an upper bound on it, with the standard error of its Monte Carlo draws."""

    nats: float  # summed over sequences
    error: float | None  # standard error of `nats`; None where each sequence has one draw, which says nothing of it
    tokens: int
    bytes: int | None = None

    @property
    def per_token(self) -> tuple[float, float | None]:
        """Nats a token, and their standard error."""
        return self._over(self.tokens)

    @property
    def perplexity(self) -> float:
        """An upper bound on the perplexity a token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> tuple[float, float | None] | None:
        """Bits a byte of text, and their standard error; None where the tokens stand for no text."""
        return None if self.bytes is None else self._over(self.bytes * math.log(2))

    def _over(self, units: float) -> tuple[float, float | None]:
        return self.nats / units, None if self.error is None else self.error / units


@torch.no_grad()
def likelihood_bound(
    nats: Nats,
    input_ids: Int[Tensor, "b l"],
    mask_id: int,
    *,
    answer: Bool[Tensor, "b l"] | None = None,
    index: Int[Tensor, " b"] | None = None,
    samples: int = 1,
    seed: int = 0,
    estimator: Literal["exact_count", "bernoulli"] = "exact_count",
    block_length: int | None = None,
) -> Float[Tensor, "b s"]:
    """`samples` independent unbiased draws of each sequence's NELBO in nats: of `answer` given the rest.

    exact_count: k ~ U{1..L}, k tokens masked, L/k * sum CE (LLaDA eq. 6; half the variance of Bernoulli masks).
    bernoulli: t ~ U(0, 1), each token masked with probability t, (1/t) * sum CE (MDLM eq. 10).
    `exact_count` stratifies k over the draws (k of draw s lies in the s-th of `samples` equal parts), which stays
    unbiased because each sequence's first part is chosen at random.

    With `block_length` it is the bound of block diffusion, the sum of its blocks' (BD3-LM eq. 7): k, t and L are those
    of a block, all blocks are masked at once, and `nats` has to show each one the clean blocks before it.
    """
    b, l = input_ids.shape
    size, device = block_length or l, input_ids.device
    answer = torch.ones_like(input_ids, dtype=torch.bool) if answer is None else answer
    index = torch.arange(b, device=device) if index is None else index
    position = torch.arange(l, device=device)
    among = by_block(answer, size)  # (b, n, c)
    length = among.sum(-1)  # (b, n)
    block = torch.arange(among.shape[1], device=device)
    shift = uniform(Purpose.BOUND, seed=seed, sample=index[:, None], position=block, token=1).to(device)
    draws = []
    for s in range(samples):
        t = (shift + s / samples) % 1.0  # (b, n)
        number = uniform(Purpose.BOUND, seed=seed, sample=index[:, None], step=s, position=position).to(device)
        number = by_block(number, size)
        if estimator == "exact_count":
            count = (t * length).floor().long() + 1
            masked, weight = smallest(number, among, count.unsqueeze(-1)), length / count
        else:
            masked, weight = (number < t.unsqueeze(-1)) & among, 1 / t
        masked = masked.flatten(1)[:, :l]
        losses = torch.zeros(b, l, dtype=torch.float64, device=device)
        losses[masked] = nats(torch.where(masked, mask_id, input_ids), masked).double()
        draws.append((by_block(losses, size).sum(-1) * weight).sum(-1))
    return torch.stack(draws, dim=-1).float()


@torch.no_grad()
def likelihood(
    nats: Nats,
    input_ids: Int[Tensor, "b l"],
    first: int | Int[Tensor, " b"],
    *,
    answer: Bool[Tensor, "b l"] | None = None,
) -> Float[Tensor, "b 1"]:
    """-log p of each sequence's `answer` under an autoregressive model; its first token is predicted from `first`.

    `nats` is shown the sequence moved one to the right, so that what stands at a position predicts the token there.
    """
    answer = torch.ones_like(input_ids, dtype=torch.bool) if answer is None else answer
    losses = torch.zeros(input_ids.shape, dtype=torch.float64, device=input_ids.device)
    losses[answer] = nats(moved_right(input_ids, first), answer).double()
    return losses.sum(-1, keepdim=True).float()


def moved_right(input_ids: Int[Tensor, "b l"], first: int | Int[Tensor, " b"]) -> Int[Tensor, "b l"]:
    """The sequence without its last token, behind a `first` one (end-of-text): what an autoregressive model is shown."""
    before = torch.as_tensor(first, device=input_ids.device).expand(len(input_ids)).unsqueeze(1)
    return torch.cat((before, input_ids[:, :-1]), dim=1)


def estimate(draws: Float[Tensor, "b s"], tokens: int, bytes: int | None = None, exact: bool = False) -> Estimate:
    """Sum over sequences of the mean over draws.

    The standard error is that of the Monte Carlo draws when there are several (within-sequence variance; for
    stratified draws this is conservative), plus nothing for the choice of sequences, which are what is measured.
    The error of `exact` values, which are not drawn, is 0; that of single draws is not known.
    """
    b, s = draws.shape
    error = (draws.double().var(-1).sum() / s).sqrt().item() if s > 1 else 0.0 if exact else None
    return Estimate(draws.double().mean(-1).sum().item(), error, tokens, bytes)


def with_error(value: float, error: float | None, form: str = ".3f", single: str = "one draw") -> str:
    """`1.234 ± 0.012`, or `1.234 (one draw: no error)` where a single draw or text leaves the error unknown."""
    return f"{value:{form}}" + (f" ({single}: no error)" if error is None else f" ± {error:{form}}")
