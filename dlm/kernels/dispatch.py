"""The public kernels: Triton on a GPU, C for fp32 on a CPU, the twin for all else. Knows nothing of how they compute."""

import os
from functools import cache
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.kernels import native, reference
from dlm.kernels.picked import Picked
from dlm.kernels.spans import Spans
from dlm.kernels.threads import threads_now

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's own switch: its kernels run in its interpreter, on CPU tensors."""


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def on_triton(x: Tensor) -> bool:
    """Whether x's device runs the Triton kernels. (They launch on the current device: hence `device_of` below.)"""
    return (x.is_cuda or INTERPRETED) and _installed()


def on_native(x: Tensor) -> bool:
    """Whether x is for the C kernels: fp32 on a CPU, no gradient asked for, of torch's own kind, whose memory is there."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.dtype == torch.float32 and x.is_cpu
    return plain and not torch.is_grad_enabled() and native.available() and not INTERPRETED


def described(dtype: torch.dtype = torch.float32, threads: int | None = None) -> str:
    """What computes on the CPU, for reports: "2 threads, kernels in C". `threads` are those that torch will be given."""
    given = torch.get_num_threads() if threads is None else threads
    native_too = dtype == torch.float32 and native.available()
    used = min(given, threads_now()) if native_too else given
    plural = "" if given == 1 else "s"
    number = (
        f"{given} thread{plural}"
        if used == given
        else f"{used} of {given} threads, since other processes use the cores"
    )
    return f"{number}, kernels in C" if native_too else number


def paged_attention(
    q: Float[Tensor, "n h e"],
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    spans: Spans,
    block_length: int | None,
    scale: float | None = None,
) -> Float[Tensor, "n h e"]:
    """Attention of n query rows to the pages of their sequences, spans of all lengths in one launch.

    p pages of s positions, g key heads, each shared by h / g query heads; keys are stored rotated. Key j is seen by a
    row at position x if j < visible and (`block_length` is None or j // block_length <= x // block_length); 1 is causal
    sight. A row that sees nothing gives zeros. What lies in slots that no row of its span sees, NaN included, has no
    effect. `scale` is 1/sqrt(e) unless given. A row's result does not depend on the rest of the launch, bit for bit.
    """
    if on_triton(q):
        from dlm.kernels import attention

        with torch.cuda.device_of(q):
            return attention.paged_attention(q, k_pages, v_pages, spans, block_length, scale)
    if on_native(q):
        return native.paged_attention(q, k_pages, v_pages, spans, block_length, scale)
    return reference.paged_attention(q, k_pages, v_pages, spans, block_length, scale)


def rope_write(
    q: Float[Tensor, "n h e"],
    k: Float[Tensor, "n g e"],
    v: Float[Tensor, "n g e"],
    cos: Float[Tensor, "n r"] | None,
    sin: Float[Tensor, "n r"] | None,
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    slots: Int[Tensor, " n"],
) -> Float[Tensor, "n h e"]:
    """Rotate q and k by their rows' cos and sin (both None: not at all), write k and v to pages, return q.

    The first r channels of each head are turned, half-split. `slots` are page * s + offset; -1 writes nothing. The
    pools must be contiguous.
    """
    if on_triton(q):
        from dlm.kernels import rope

        with torch.cuda.device_of(q):
            return rope.rope_write(q, k, v, cos, sin, k_pages, v_pages, slots)
    if on_native(q):
        return native.rope_write(q, k, v, cos, sin, k_pages, v_pages, slots)
    return reference.rope_write(q, k, v, cos, sin, k_pages, v_pages, slots)


def rms_norm(
    x: Float[Tensor, "n d"], weight: Float[Tensor, " d"], eps: float, residual: Float[Tensor, "n d"] | None = None
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """(norm of x + residual, x + residual): the sum in x's dtype, the norm in fp32, cast back, then times weight."""
    if on_triton(x):
        from dlm.kernels import norm

        with torch.cuda.device_of(x):
            return norm.rms_norm(x, weight, eps, residual)
    if on_native(x):
        return native.rms_norm(x, weight, eps, residual)
    return reference.rms_norm(x, weight, eps, residual)


def confidence(
    logits: Float[Tensor, "n v"],
    *,
    mask_id: int | None,
    keep_mask: bool = True,
    temperature: float = 0.0,
    seed: Int[Tensor, " n"] | None = None,
    sample: Int[Tensor, " n"] | None = None,
    step: Int[Tensor, " n"] | None = None,
    position: Int[Tensor, " n"] | None = None,
) -> Picked:
    """A token for each row and how sure the row is of it, in one pass over the vocabulary.

    Never the mask: the argmax at temperature 0 (ties to the lower id), else a draw whose noise has the row's address
    (seed, sample, step, position). `keep_mask` leaves the mask token in the softmax's denominator and entropy. At
    temperature 0 p is the plain softmax.
    """
    address = {"seed": seed, "sample": sample, "step": step, "position": position}
    if on_triton(logits):
        from dlm.kernels import pick

        with torch.cuda.device_of(logits):
            return pick.confidence(logits, mask_id=mask_id, keep_mask=keep_mask, temperature=temperature, **address)
    if on_native(logits) and temperature == 0:
        return native.confidence(logits, mask_id=mask_id, keep_mask=keep_mask)
    return reference.confidence(logits, mask_id=mask_id, keep_mask=keep_mask, temperature=temperature, **address)
