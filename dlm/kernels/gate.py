"""silu(gate) * up over a packed product, one Triton kernel."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# (inside a kernel, Python is Triton's)

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

VALUES = 1024


def gated(gate_up: Float[Tensor, "n two_f"]) -> Float[Tensor, "n f"]:
    """See `dlm.kernels.dispatch`."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1 and gate_up.shape[1] == 2 * width
    out = torch.empty((n, width), dtype=gate_up.dtype, device=gate_up.device)
    if n > 0:
        gate[(n, triton.cdiv(width, VALUES))](
            gate_up, out, gate_up.stride(0), WIDTH=width, VALUES=VALUES, num_warps=4, enable_fp_fusion=False
        )
    return out


@triton.jit
def swish(gate, up):
    """silu(gate) * up: silu and the product are each rounded to the dtype of both."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def gate(gate_up, out, gate_up_row, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    row, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    here, inside = gate_up + row * gate_up_row + f, f < WIDTH
    found = swish(tl.load(here, mask=inside, other=0.0), tl.load(here + WIDTH, mask=inside, other=0.0))
    tl.store(out + row * WIDTH + f, found, mask=inside)
