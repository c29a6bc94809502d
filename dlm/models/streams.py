"""The two streams of block diffusion, noisy blocks beside clean text, in one forward."""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

SMALLEST_HEAD = 16
"""Channels a head has at least in FlexAttention's kernel; smaller ones are padded."""


def visibility(length: int, block_length: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether row q sees row k of a canvas [noisy | clean] of 2 * length rows, as FlexAttention asks it (BD3-LM, eq. 8).

    A block sees itself in its own stream; clean text sees the clean blocks before it, and so do noisy blocks.
    """

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        stream_q, stream_k = q // length, k // length  # 1 is clean; compared as booleans, inductor cannot compile it
        block_q, block_k = q % length // block_length, k % length // block_length
        return (block_q == block_k) & (stream_q == stream_k) | (stream_k == 1) & (block_k < block_q)

    return sees


def dense_mask(length: int, block_length: int, device: torch.device) -> Bool[Tensor, "1 m m"]:
    """The same as a table."""
    row, nothing = torch.arange(2 * length, device=device), torch.zeros((), device=device)
    return visibility(length, block_length)(nothing, nothing, row[:, None], row)[None]


@torch.compiler.disable()
@lru_cache(maxsize=8)
def block_mask(length: int, block_length: int, device: torch.device) -> BlockMask:
    """The same for FlexAttention, which skips the masked parts: about three quarters."""
    return create_block_mask(visibility(length, block_length), None, None, 2 * length, 2 * length, device)


def flex_attend(
    q: Float[Tensor, "b h m e"], k: Float[Tensor, "b g m e"], v: Float[Tensor, "b g m e"], seen: BlockMask
) -> Float[Tensor, "b h m e"]:
    """Attention by FlexAttention's kernel, which is compiled at the first call."""
    run = flex_attention if torch.compiler.is_compiling() else _compiled()
    e = q.shape[-1]
    q, k, v = (F.pad(x, (0, max(0, SMALLEST_HEAD - e))) for x in (q, k, v))
    return run(q, k, v, block_mask=seen, scale=e**-0.5, enable_gqa=q.shape[1] != k.shape[1])[..., :e]


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
