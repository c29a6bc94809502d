"""What int8 products read, made by torch: weights in groups of 64 with a scale each, and rows rounded alike."""

import torch
import torch.nn.functional as F

from dlm.kernels.c import products
from dlm.kernels.int8 import GROUP, int8_weight


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each group of 64 inputs to 127 steps of its largest, half to even, and back: in float64."""
    wide = x.double()
    parts = F.pad(wide, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    top = parts.float().abs().amax(-1, keepdim=True)
    scale, steps = top / 127, (parts.float() * (127 / top.clamp_min(1e-30))).round()
    return (steps.double() * scale.double()).flatten(1)[:, : x.shape[1]]


def with_weights(w: torch.Tensor) -> tuple[products.Product, torch.Tensor]:
    """A product of int8 weights, and what they stand for."""
    packed = int8_weight(w, products.panel_width())
    made = products.int8_product(packed)
    made.kept = packed
    return made, packed.back(torch.float64)


def product(w: torch.Tensor) -> products.Product:
    return with_weights(w)[0]
