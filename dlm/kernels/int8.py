"""Weights as whole numbers of 8 or 16 bits: of each output, every 64 inputs share a scale. Kept in panels, the layout that
the products in C read."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import BFloat16, Float, Int
from torch import Tensor

GROUP, WORD = 64, 4
"""Inputs with one scale; int8 in a word of C's, which holds half as many int16."""


@dataclass(frozen=True)
class WholeWeight:
    """A weight (n, k): w[i, j] is about panels * scale, to half a scale."""

    panels: Int[Tensor, "p words width inputs"]
    scales: Float[Tensor, "p groups width"]
    shape: tuple[int, int]

    def back(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "n k"]:
        """The weight that it stands for."""
        n, k = self.shape
        rows = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)  # (p * width, k)
        scales = self.scales.transpose(1, 2).flatten(0, 1).repeat_interleave(GROUP, 1)
        return (rows * scales[:, :k]).to(dtype)[:n]


def int8_weight(w: Float[Tensor, "n k"], width: int) -> WholeWeight:
    """A weight rounded to int8, in panels of so many outputs; k is a multiple of 4. A scale is its group's largest / 127."""
    groups = _groups(w, width)
    return _whole(w, width, groups, groups.abs().amax(-1) / 127, torch.int8)


def int16_weight(w: BFloat16[Tensor, "n k"], width: int) -> WholeWeight:
    """A weight of bfloat16 as int16 of at most 12 bits, in panels of so many outputs; k is even.

    Scales are powers of two, by which a group's largest becomes 2048 to 4080: whatever is at least a sixteenth of it keeps
    its value, and the rest is within 1 / 4096 of it.
    """
    groups = _groups(w, width)
    exponent = torch.frexp(groups.abs().amax(-1)).exponent - 12
    return _whole(w, width, groups, torch.exp2(exponent.clamp(-120, 120).float()), torch.int16)


def _groups(w: Tensor, width: int) -> Float[Tensor, "n groups 64"]:
    """Filled up with zeros to whole groups and panels."""
    n, k = w.shape
    return F.pad(w.float(), (0, -k % GROUP, 0, -n % width)).unflatten(1, (-1, GROUP))


def _whole(w: Tensor, width: int, groups: Tensor, scales: Float[Tensor, "n groups"], dtype: torch.dtype) -> WholeWeight:
    steps = torch.where(scales > 0, 1 / scales, 0.0)
    most = 127 if dtype == torch.int8 else 4095
    rows = (groups * steps[..., None]).round().clamp(-most, most).to(dtype).flatten(1)[:, : w.shape[1]]
    panels = rows.unflatten(1, (-1, 4 // dtype.itemsize)).unflatten(0, (-1, width)).transpose(1, 2).contiguous()
    n, k = w.shape
    return WholeWeight(panels, scales.unflatten(0, (-1, width)).transpose(1, 2).contiguous(), (n, k))
