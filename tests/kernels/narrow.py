"""What int8 products read, made by torch: weights in groups of 64 with a scale each, and rows rounded alike."""

import torch
import torch.nn.functional as F

from dlm.kernels.c import native

GROUP = 64


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each group of 64 inputs to 127 steps of its largest, half to even, and back: in float64."""
    wide = x.double()
    parts = F.pad(wide, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scale = (x.abs().float().new_tensor(0) + parts.float().abs().amax(-1, keepdim=True)) / 127
    steps = (parts.float() * (127 / parts.float().abs().amax(-1, keepdim=True).clamp_min(1e-30))).round()
    return (steps.double() * scale.double()).flatten(1)[:, : x.shape[1]]


def with_weights(w: torch.Tensor) -> tuple[native.Product, torch.Tensor]:
    """A product of int8 weights, and what they stand for."""
    packed = native.int8_weight(w)
    made = native.int8_product(packed)
    made.kept = packed
    return made, native.int8_weight_back(packed)


def product(w: torch.Tensor) -> native.Product:
    return with_weights(w)[0]
