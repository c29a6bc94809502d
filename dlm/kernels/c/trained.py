"""Kernels in C that have gradients: what a training step on a CPU computes in fp32, and products of rounded factors.

Each does what torch's operations beside it in `dlm.models` do, in one pass over memory instead of five to ten.
`takes` says whether they may be used on a tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dlm.kernels.c import binding
from dlm.kernels.threads import threads_now

CHUNK = 256
"""As in training.c."""


def takes(*tensors: Tensor) -> bool:
    """Whether these are plain fp32 tensors on a CPU, with gradients being recorded, where there is a compiled library."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and all(type(x) in PLAIN and x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
        and binding.unavailable() is None
    )


PLAIN = (Tensor, torch.nn.Parameter)


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float) -> Float[Tensor, "... d"]:
    """weight * x / sqrt(mean(x^2) + eps)."""
    return _Norm.apply(x, weight, eps)


def gated(gate: Float[Tensor, "... f"], up: Float[Tensor, "... f"]) -> Float[Tensor, "... f"]:
    """silu(gate) * up."""
    return _Gate.apply(gate, up)


def rotate(x: Float[Tensor, "b l h e"], cos: Float[Tensor, "b l 1 r"], sin: Float[Tensor, "b l 1 r"]) -> Tensor:
    """As `dlm.models.attention.rotate`; both halves of a row of cos are alike, and of sin."""
    return _Rotate.apply(x, cos, sin)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, weight = x.detach().contiguous().view(-1, x.shape[-1]), weight.detach().contiguous()
        out, scales = torch.empty(x.shape), torch.empty(len(rows))
        binding.call("dlm_norm", rows, weight, eps, out, scales, *rows.shape)
        ctx.save_for_backward(rows, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scales = ctx.saved_tensors
        slope = slopes[0].contiguous()
        dx, share = torch.empty(slope.shape), torch.zeros(-(-len(rows) // CHUNK), rows.shape[1])
        binding.call("dlm_norm_back", rows, weight, scales, slope, dx, share, *rows.shape)
        return dx, share.sum(0), None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.detach().contiguous(), up.detach().contiguous()
        out = torch.empty(gate.shape)
        binding.call("dlm_gate", gate, up, out, gate.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty(gate.shape), torch.empty(gate.shape)
        binding.call("dlm_gate_back", gate, up, slopes[0].contiguous(), dgate, dup, gate.numel())
        return dgate, dup


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, l, h, e = x.shape
        cos, sin = (table.detach().expand(b, l, 1, -1).contiguous().view(b * l, -1) for table in (cos, sin))
        ctx.save_for_backward(cos, sin)
        return _rotated(x.detach(), cos, sin)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(slopes[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, l, h, e = x.shape
    x, out = x.contiguous(), torch.empty(x.shape)
    binding.call("dlm_rotate", x, h * e, cos, sin, out, b * l, h, e, cos.shape[1])
    return out


# --- products of factors rounded to half precision ------------------------------------------------------------------------


def no_halves() -> str | None:
    """Why products of halves cannot be had on this machine; None where they can."""
    why = binding.unavailable()
    if why is None and not binding.loaded().dlm_half_available():
        return "this processor does not multiply numbers of half precision (avx512_fp16), or the compiler cannot say so"
    return why


def largest(x: Float[Tensor, "m k"]) -> float:
    """The largest absolute value."""
    x = x if x.stride(-1) == 1 else x.T
    return binding.loaded().dlm_largest(x.data_ptr(), *x.shape, x.stride(0))


def half_product(
    a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], tops: tuple[float, float] | None = None
) -> Float[Tensor, "m n"]:
    """a b in fp32, each factor rounded to half precision after scaling; `tops` are their largest absolute values."""
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
    (m, k), n, threads = a.shape, b.shape[1], threads_now()
    tops = tops or (largest(a), largest(b))
    out, library = torch.empty(m, n), binding.loaded()
    room = torch.empty(library.dlm_half_room(threads), dtype=torch.uint8)
    factors = a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride()
    library.dlm_half_product(*factors, out.data_ptr(), m, n, k, *tops, room.data_ptr(), threads)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows, weight = x.detach().reshape(-1, x.shape[-1]), weight.detach()
        ctx.tops = largest(rows), largest(weight)
        ctx.save_for_backward(rows, weight)
        return half_product(rows, weight.T, ctx.tops).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        slope, (top_x, top_w) = slopes[0].reshape(-1, len(weight)), ctx.tops
        top = largest(slope)
        dx = (
            half_product(slope, weight, (top, top_w)).view(*slopes[0].shape[:-1], -1)
            if ctx.needs_input_grad[0]
            else None
        )
        dw = half_product(slope.T, rows, (top, top_x)) if ctx.needs_input_grad[1] else None
        return dx, dw


class _Halves(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = function is F.linear and not kwargs and (len(args) == 2 or args[2] is None)
        if plain and takes(*args[:2]):
            return _Linear.apply(*args[:2])
        return function(*args, **(kwargs or {}))


@contextmanager
def halves() -> Iterator[None]:
    """Until left, linear layers without bias multiply halves, forwards and backwards."""
    with _Halves():
        yield
