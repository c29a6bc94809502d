"""Matrix products that do not depend on how many rows are multiplied together."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 32


class FixedRows(TorchFunctionMode):
    """While entered, every linear layer works on pieces of exactly `rows` rows, the last one filled up with zeros.

    A library chooses its kernel, and with it the order of additions, by the shape of a product. With one shape, a row's
    result does not depend on the other rows, bit for bit. Norms and activations never mix rows. Not covered:
    `grouped_mm`, which mixtures of experts use in bfloat16 on a GPU.
    """

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear:
            return _linear(self.rows, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(rows: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if short := -len(flat) % rows:
        flat = F.pad(flat, (0, 0, 0, short))
    pieces = [F.linear(piece, weight, bias) for piece in flat.split(rows)]
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out[: len(out) - short].view(*x.shape[:-1], -1)
