"""Weights in 8 bits: of each output, every 64 inputs share a scale. Kept in panels, the layout that the products in C read."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

GROUP, WORD = 64, 4
"""Inputs with one scale; int8 in a word of C's."""


@dataclass(frozen=True)
class Int8Weight:
    """A weight (n, k): w[i, j] is about bytes * scale, to half a step of its group's largest / 127."""

    panels: Int8[Tensor, "p words width 4"]
    scales: Float[Tensor, "p groups width"]
    shape: tuple[int, int]

    def back(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "n k"]:
        """The weight that it stands for."""
        n, k = self.shape
        rows = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)  # (p * width, k)
        scales = self.scales.transpose(1, 2).flatten(0, 1).repeat_interleave(GROUP, 1)
        return (rows * scales[:, :k]).to(dtype)[:n]


def int8_weight(w: Float[Tensor, "n k"], width: int) -> Int8Weight:
    """A weight rounded to int8, in panels of so many outputs; k is a multiple of 4."""
    n, k = w.shape
    whole = F.pad(w.float(), (0, -k % GROUP, 0, -n % width)).unflatten(1, (-1, GROUP))
    scales = whole.abs().amax(-1) / 127
    steps = torch.where(scales > 0, 1 / scales, 0.0)
    rows = (whole * steps[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(1)[:, :k]
    panels = rows.unflatten(1, (-1, WORD)).unflatten(0, (-1, width)).transpose(1, 2).contiguous()
    return Int8Weight(panels, scales.unflatten(0, (-1, width)).transpose(1, 2).contiguous(), (n, k))
