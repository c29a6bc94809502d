"""Random numbers with addresses: each is a function of (seed, sample, purpose, step, position, token), never of a state.

So a draw does not depend on batching, scheduling, memory layout or what was drawn before it.
"""

from enum import IntEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.errors import UserError

WORD, LIMIT = 0xFFFFFFFF, 2**63
IN_CACHE = 2**16
"""Tokens whose noise a CPU computes at a time: all its int64 words together stay in the cache."""


class Purpose(IntEnum):
    """What a draw decides; different purposes never share a number."""

    TOKEN = 0  # Gumbel noise on a token's logit
    ORDER = 1  # which masked position goes first (rule `random`)
    MASK = 2  # is this training token masked
    TIME = 3  # the noise level of a training sample
    LENGTH = 4  # truncation of a training sample
    BOUND = 5  # masks of the likelihood estimate
    SHUFFLE = 6  # order of training data
    ACCEPT = 7  # speculative acceptance
    LAYER = 8  # which layers are aligned in a training step
    ALIGN = 9  # which masked tokens are
    DRAFT = 10  # a drafted token
    RESIDUAL = 11  # the token in place of a refused one
    ANCHOR = 12  # where a draft's blocks begin in a training sequence
    NOISE = 13  # the noise that a latent starts from, or is shown under
    PATH = 14  # noise that a sampler adds on its way
    CONDITION = 15  # what a training step shows a latent model besides the noise: a prompt, its own last guess
    DECODER = 16  # noise and dropout in front of a latent model's decoder
    SPAN = 17  # runs of tokens that a training sample loses together


def _multiply(x: Int[Tensor, "..."], constant: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32x32-bit product. In int64 it may wrap round, which leaves its 64 bits as they are."""
    product = x * constant
    return (product >> 32) & WORD, product & WORD


def _word(value: Tensor | int) -> Tensor:
    """The low 32 bits, as int64."""
    if isinstance(value, int) and not -LIMIT <= value < LIMIT:
        raise UserError(
            f"{value} is too large for a seed, a sample, a step, a position or a token: use less than 2**63"
        )
    return torch.as_tensor(value, dtype=torch.int64) & WORD


def philox(
    key: tuple[Tensor | int, Tensor | int], counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., SC'11): four 32-bit words, as int64, for each broadcast (key, counter).

    Pinned to the Random123 known-answer vectors by the tests; Triton's and cuRAND's Philox is the same function.
    """
    k0, k1, c0, c1, c2, c3 = (_word(word) for word in (*key, *counter))
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniform(
    purpose: Purpose,
    *,
    seed: Tensor | int,
    sample: Tensor | int = 0,
    step: Tensor | int = 0,
    position: Tensor | int = 0,
    token: Tensor | int = 0,
) -> Float[Tensor, "..."]:
    """One number in (0, 1) for each broadcast address: (w + 1/2) / 2^32 in fp64, so neither 0 nor 1 occurs."""
    word = philox((seed, sample), (int(purpose), step, position, token))[0]
    return (word.double() + 0.5) / 2**32


def gumbel(*, seed: Tensor, sample: Tensor, step: Tensor, position: Tensor, vocab_size: int) -> Float[Tensor, "n v"]:
    """Standard Gumbel noise for each row's whole vocabulary, in fp32; seed, sample, step, position are (n,).

    One Philox call serves four consecutive tokens. The noise is -log(-log1p(-w)) with w = (word + 1/2)/2^32:
    rare large values come from small w, which fp32 resolves, so the upper tail is not truncated
    (arXiv 2409.02908 shows what -log(-log(u)) in fp32 does to it).
    """
    address = [x.reshape(-1, 1) for x in torch.broadcast_tensors(seed, sample, step, position)]
    group = torch.arange((vocab_size + 3) // 4, device=seed.device)
    rows = len(address[0]) if seed.is_cuda else max(1, IN_CACHE // vocab_size)
    parts = zip(*(x.split(max(1, rows)) for x in address), strict=True)
    return torch.cat([_gumbel(a, b, c, d, group)[:, :vocab_size] for a, b, c, d in parts])


def _gumbel(seed: Tensor, sample: Tensor, step: Tensor, position: Tensor, group: Tensor) -> Float[Tensor, "n v"]:
    words = philox((seed, sample), (int(Purpose.TOKEN), step, position, group))
    word = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)
    small = ((word.double() + 0.5) / 2**32).float().clamp_max(1 - 2**-24)
    return -torch.log(-torch.log1p(-small))


def normal(
    purpose: Purpose,
    *,
    seed: Tensor | int,
    sample: Tensor | int = 0,
    step: Tensor | int = 0,
    position: Tensor | int = 0,
    size: int,
) -> Float[Tensor, "... c"]:
    """Standard normal numbers in fp32: `size` of them for each broadcast address, along a last axis of their own.

    One Philox call serves four neighbours; a number is the normal quantile of its uniform one.
    """
    group = torch.arange((size + 3) // 4)
    address = [torch.as_tensor(x).unsqueeze(-1) for x in (seed, sample, step, position)]
    words = philox((address[0], address[1]), (int(purpose), address[2], address[3], group.to(address[1].device)))
    word = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :size]
    return torch.special.ndtri((word.double() + 0.5) / 2**32).float()
