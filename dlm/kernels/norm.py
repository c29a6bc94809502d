"""RMSNorm with the residual added on the way, one Triton kernel."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# (inside a kernel, Python is Triton's)

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

VALUES = 2048  # a program takes so many, or one row


def rms_norm(
    x: Float[Tensor, "n d"], weight: Float[Tensor, " d"], eps: float, residual: Float[Tensor, "n d"] | None = None
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """See `dlm.kernels.dispatch`. How many rows share a program follows from d alone."""
    n, d = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and (residual is None or residual.stride(1) == 1)
    assert residual is None or residual.dtype == x.dtype
    normed = torch.empty((n, d), dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    total = x if residual is None else torch.empty((n, d), dtype=x.dtype, device=x.device)
    if n == 0:
        return normed, total
    padded = triton.next_power_of_2(d)
    rows = max(1, VALUES // padded)
    normalise[(triton.cdiv(n, rows),)](
        x, x if residual is None else residual, weight, normed, total, n, eps,
        x.stride(0), x.stride(0) if residual is None else residual.stride(0),
        WIDTH=d, PADDED=padded, ROWS=rows, ADD=residual is not None,
        num_warps=max(4, min(16, padded // 512)), enable_fp_fusion=False,
    )  # fmt: skip
    return normed, total


@triton.jit(do_not_specialize=["n"])
def normalise(
    x, residual, weight, normed, total, n, eps, x_row, residual_row,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    inside = (row < n) & (d < WIDTH)
    wide = tl.load(x + row * x_row + d, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * residual_row + d, mask=inside, other=0.0).to(tl.float32)
        narrow = wide.to(x.dtype.element_ty)  # the norm is of what is kept
        tl.store(total + row * WIDTH + d, narrow, mask=inside)
        wide = narrow.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    unit = (wide * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
    scaled = unit * tl.load(weight + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    tl.store(normed + row * WIDTH + d, scaled.to(normed.dtype.element_ty), mask=inside)
