"""Matrix products in Triton whose rows do not depend on their company: of one weight, or each row with its expert's.

A tile's sizes follow from the dtype alone, and each sum runs over the channels in order.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (inside a kernel, Python is Triton's)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from dlm.kernels.chips import Chip
from dlm.kernels.gate import swish

SIDE = {2: 64, 4: 32}  # rows, outputs and channels of a tile, by the bytes of an element: a cube


@dataclass(frozen=True)
class Arranged:
    """Rows sorted by expert, and the tiles that they make; see `dlm.kernels.experts`."""

    order: Tensor
    """int32: the row that each place takes."""
    ends: Tensor
    """int32: where each expert's places end."""
    experts: Tensor
    """int32: each tile's expert; -1: there is no such tile."""
    firsts: Tensor
    """int32: each tile's first place."""


def product(
    x: Float[Tensor, "n d"],
    weight: Float[Tensor, "*e o d"],
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    arranged: Arranged | None = None,
    each: int = 1,
    back: bool = False,
) -> Tensor:
    """x weight^T, in x's dtype unless given; `gated`: as by `dlm.kernels.dispatch.gated`.

    With `arranged`, a row for each of its places, by its expert's weight: of the row that its order names, of which
    `each` share one of x; or, with `back`, of x's row there, put where the order says.
    """
    d, outputs = x.shape[1], weight.shape[-2] // (1 + gated)
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.shape[-1] == d and weight.dtype == x.dtype
    rows = x.shape[0] if arranged is None else len(arranged.order)
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    side = SIDE[x.element_size()]
    tiles = triton.cdiv(rows, side) if arranged is None else len(arranged.experts)
    lists = (x,) * 4 if arranged is None else (arranged.order, arranged.ends, arranged.experts, arranged.firsts)
    chip, stage = Chip.of(x.device), (2 + gated) * side * side * x.element_size()
    stages = chip.shared_memory // (2 * stage) + (
        chip.generation in (8, 12)
    )  # two programs fit; there n take n - 1 tiles
    multiply[(triton.cdiv(outputs, side), tiles)](
        x, weight, out, *lists, rows, x.stride(0),
        WIDTH=d, OUTPUTS=outputs, SIDE=side, GATED=gated, EXPERTS=arranged is not None, EACH=each, BACK=back,
        num_warps=4, num_stages=max(2, min(5, stages)), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def gated_product(x: Float[Tensor, "n d"], weight: Float[Tensor, "two_f d"]) -> Float[Tensor, "n f"]:
    """See `dlm.kernels.dispatch`."""
    return product(x, weight, gated=True)


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x, weight, out, order, ends, experts, firsts, rows, x_row,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, SIDE: tl.constexpr, GATED: tl.constexpr, EXPERTS: tl.constexpr,
    EACH: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    if EXPERTS:
        expert = tl.load(experts + tile)
        if expert < 0:
            return
        place = tl.load(firsts + tile) + tl.arange(0, SIDE)
        live = place < tl.load(ends + expert)
        row = tl.load(order + place, mask=live, other=0)
        source, target = (place, row) if BACK else (row // EACH, place)
        weight += expert.to(tl.int64) * ((1 + GATED) * OUTPUTS * WIDTH)
    else:
        source = tile * SIDE + tl.arange(0, SIDE)
        live, target = source < rows, source
    output = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    channel = tl.arange(0, SIDE)
    here = x + source.to(tl.int64)[:, None] * x_row + channel[None, :]
    low = weight + output.to(tl.int64)[:, None] * WIDTH + channel[None, :]
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    up = acc
    for start in range(0, WIDTH, SIDE):
        inside = channel[None, :] < WIDTH - start
        a = tl.load(here + start, mask=live[:, None] & inside, other=0.0)
        b = tl.load(low + start, mask=(output < OUTPUTS)[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        if GATED:
            c = tl.load(low + OUTPUTS * WIDTH + start, mask=(output < OUTPUTS)[:, None] & inside, other=0.0)
            up = tl.dot(a, tl.trans(c), up, input_precision="ieee")
    found = acc.to(out.dtype.element_ty)
    if GATED:
        found = swish(found, up.to(out.dtype.element_ty))
    at = out + target.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(at, found, mask=live[:, None] & (output < OUTPUTS)[None, :])
