"""Norm and rotate queries and keys and write keys and values to their pages, one Triton kernel."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (inside a kernel, Python is Triton's)

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

HEADS = 8  # query heads a program rotates, about


def rope_write(
    q: Float[Tensor, "n h e"],
    k: Float[Tensor, "n g e"],
    v: Float[Tensor, "n g e"],
    cos: Float[Tensor, "n r"] | None,
    sin: Float[Tensor, "n r"] | None,
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    slots: Int[Tensor, " n"],
    q_weight: Float[Tensor, " e"] | None = None,
    k_weight: Float[Tensor, " e"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "n h e"]:
    """See `dlm.kernels.dispatch`. Sums and products are rounded where PyTorch rounds them, so without norms the twin's
    bits come out."""
    n, h, e = q.shape
    g, rotated = k.shape[1], 0 if cos is None else cos.shape[1]
    assert h % g == 0 and rotated <= e and rotated % 2 == 0, (q.shape, k.shape, rotated)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1 and k_pages.is_contiguous() and v_pages.is_contiguous()
    norm = q_weight is not None and k_weight is not None
    if q_weight is None or k_weight is None:
        q_weight = k_weight = q  # stand-ins, never read
    else:
        assert q_weight.dtype == k_weight.dtype == q.dtype and q_weight.is_contiguous() and k_weight.is_contiguous()
    out = q if cos is None and not norm else torch.empty((n, h, e), dtype=q.dtype, device=q.device)
    if n == 0:
        return out
    if cos is None or sin is None:
        cos = sin = q  # stand-ins, never read
    assert cos.stride(1) == sin.stride(1) or rotated == 0
    heads = min(triton.next_power_of_2(g), max(1, HEADS * g // h))
    rotate_and_write[(n, triton.cdiv(g, heads))](
        q, k, v, cos, sin, q_weight, k_weight, out, k_pages, v_pages, slots, g, eps,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), sin.stride(0),
        HEAD=e, HALF=rotated // 2, GROUP=h // g, HEADS=heads, NORM=norm, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def rotated_half(x, mirrored, cos, sin):
    """x * cos + mirrored * sin as PyTorch computes it: each product and the sum rounded to the operands' dtype."""
    a, b = x.to(tl.float32) * cos.to(tl.float32)[None, :], mirrored.to(tl.float32) * sin.to(tl.float32)[None, :]
    if x.dtype == cos.dtype:
        a, b = a.to(x.dtype).to(tl.float32), b.to(x.dtype).to(tl.float32)
    return (a + b).to(x.dtype)


@triton.jit
def scaled(x, scale, weight):
    """x times its norm's scale, rounded to x's dtype, times weight."""
    unit = (x.to(tl.float32) * scale[:, None]).to(x.dtype).to(tl.float32)
    return (unit * weight.to(tl.float32)[None, :]).to(x.dtype)


@triton.jit
def copy_heads(
    x, out, cos, sin, weight, eps, head, heads, x_head,
    HEAD: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads of one row from x (strided) to out (packed), normed, the first 2 * HALF channels rotated."""
    index = (head + tl.arange(0, HEADS))[:, None]
    here, there, live = x + index * x_head, out + index * HEAD, index < heads
    done: tl.constexpr = 2 * HALF if ROTATE else 0
    turning = tl.arange(0, triton.next_power_of_2(HALF) if ROTATE else 1)
    resting = done + tl.arange(0, triton.next_power_of_2(HEAD - done) if done < HEAD else 1)
    squares = tl.zeros((HEADS,), tl.float32)
    if ROTATE:
        inside = turning < HALF
        low = tl.load(here + turning, mask=live & inside, other=0.0)
        high = tl.load(here + HALF + turning, mask=live & inside, other=0.0)
        if NORM:
            squares += tl.sum(low.to(tl.float32) * low.to(tl.float32), 1)
            squares += tl.sum(high.to(tl.float32) * high.to(tl.float32), 1)
    if done < HEAD:
        rest = tl.load(here + resting, mask=live & (resting < HEAD), other=0.0)
        if NORM:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
    scale = tl.rsqrt(squares / HEAD + eps)
    if ROTATE:
        if NORM:
            low = scaled(low, scale, tl.load(weight + turning, mask=inside, other=0.0))
            high = scaled(high, scale, tl.load(weight + HALF + turning, mask=inside, other=0.0))
        cos_low, cos_high = tl.load(cos + turning, mask=inside), tl.load(cos + HALF + turning, mask=inside)
        sin_low, sin_high = tl.load(sin + turning, mask=inside), tl.load(sin + HALF + turning, mask=inside)
        tl.store(there + turning, rotated_half(low, -high, cos_low, sin_low), mask=live & inside)
        tl.store(there + HALF + turning, rotated_half(high, low, cos_high, sin_high), mask=live & inside)
    if done < HEAD:
        if NORM:
            rest = scaled(rest, scale, tl.load(weight + resting, mask=resting < HEAD, other=0.0))
        tl.store(there + resting, rest, mask=live & (resting < HEAD))


@triton.jit
def rotate_and_write(
    q, k, v, cos, sin, q_weight, k_weight, out, k_pages, v_pages, slots, g, eps,
    q_row, q_head, k_row, k_head, v_row, v_head, cos_row, sin_row,
    HEAD: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    cos, sin = cos + row * cos_row, sin + row * sin_row
    if HALF > 0 or NORM:
        for member in tl.static_range(GROUP):
            start = head * GROUP + member * HEADS
            copy_heads(
                q + row * q_row, out + row * g * GROUP * HEAD, cos, sin, q_weight, eps, start, g * GROUP, q_head,
                HEAD, HALF, HEADS, HALF > 0, NORM,
            )  # fmt: skip
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        at = slot * g * HEAD
        copy_heads(
            k + row * k_row, k_pages + at, cos, sin, k_weight, eps, head, g, k_head, HEAD, HALF, HEADS, HALF > 0, NORM
        )  # fmt: skip
        copy_heads(v + row * v_row, v_pages + at, cos, sin, v, eps, head, g, v_head, HEAD, HALF, HEADS, False, False)
