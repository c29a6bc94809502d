"""Matrix products that do not depend on how many rows are multiplied together."""

from contextvars import ContextVar, Token
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 32
_entered: ContextVar[bool] = ContextVar("entered", default=False)


def rows_are_fixed() -> bool:
    """Whether `FixedRows` is entered."""
    return _entered.get()


class FixedRows(TorchFunctionMode):
    """While entered, every linear layer works on pieces of exactly `rows` rows, the last one filled up with zeros.

    A library chooses its kernel, and with it the order of additions, by the shape of a product. With one shape, a row's
    result does not depend on the other rows, bit for bit. Norms and activations never mix rows, and our own products of
    experts need no such help.
    """

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.rows = rows
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> Any:
        self._tokens.append(_entered.set(True))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _entered.reset(self._tokens.pop())

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
