"""What products of whole numbers read, made by torch: weights in groups of 64 with a scale each, and rows rounded alike."""

import torch
import torch.nn.functional as F

from dlm.kernels.c import products
from dlm.kernels.int8 import GROUP, int8_weight, int16_weight

STEPS = {"int8": 127, "int16": 8191}
"""Of a row's numbers, on either side of 0."""


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Each group of 64 inputs to so many steps of its largest, half to even, and back: in float64."""
    most = STEPS[kind.partition("-")[0]]
    parts = F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    top = parts.abs().amax(-1, keepdim=True)
    scale, steps = top / most, (parts.double() * (torch.tensor(float(most)) / top.clamp_min(1e-30)).double()).round()
    return (steps * scale.double()).flatten(1)[:, : x.shape[1]]


def with_weights(w: torch.Tensor, kind: str) -> tuple[products.Product, torch.Tensor]:
    """A product of that kind, and what its weights stand for."""
    packed = (int16_weight if kind.startswith("int16") else int8_weight)(w, products.panel_width())
    made = products.whole_product(packed)
    made.kept, made.kind = packed, products.KINDS.index(kind)
    return made, packed.back(torch.float64)
