"""The gated feed-forward: down(silu(gate(x)) * up(x))."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dlm.kernels.c import trained
from dlm.kernels.dispatch import gated, gated_product
from dlm.models.attention import fusing, shares
from dlm.models.deterministic import rows_are_fixed

FEW = 64
"""Up to so many rows our own product of gate and up, which takes a launch less, reads its weights once."""


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), of d channels and f between."""

    def __init__(self, d: int, f: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, f, bias=bias)
        self.up_proj = nn.Linear(d, f, bias=bias)
        self.down_proj = nn.Linear(f, d, bias=bias)
        self.packed: Tensor | None = None
        """The weights of gate and up side by side; see dlm.models.packing."""
        self.packed_bias: Tensor | None = None
        """Their biases."""

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        packed = self.packed
        if packed is None or torch.is_grad_enabled() or not shares(self.gate_proj, packed, self.packed_bias):
            gate, up = self.gate_proj(x), self.up_proj(x)
            return self.down_proj(trained.gated(gate, up) if trained.takes(gate, up) else F.silu(gate) * up)
        fused = fusing(x)
        if fused and self.packed_bias is None and x.dtype == packed.dtype and not rows_are_fixed():
            flat = x.reshape(-1, x.shape[-1])
            if len(flat) <= FEW:
                return self.down_proj(gated_product(flat, packed).view(*x.shape[:-1], -1))
        both = F.linear(x, packed, self.packed_bias)
        if fused:
            return self.down_proj(gated(both.reshape(-1, both.shape[-1])).view(*x.shape[:-1], -1))
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))
