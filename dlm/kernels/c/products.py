"""Matrix products, and whole layers, in C. Weights are float32, bfloat16, int8 or int16, and may be copied into panels."""

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.kernels.c import binding
from dlm.kernels.c.structs import Layer, Network, Product, Run
from dlm.kernels.int8 import WholeWeight
from dlm.kernels.threads import threads_now

KINDS = ("float32", "bf16-widened", "bf16-dots", "bf16-tiles", "int8-widened", "int8-dots", "int16-dots")
"""What products multiply and how, in the order of kernels.h: weights made floats, pairs and quads summed by one
instruction, AMX."""


def multiplies(kind: str) -> bool:
    """Whether this processor has what the kind needs, and the library was compiled for it."""
    return bool(binding.loaded().dlm_multiplies(KINDS.index(kind)))


def fastest(dtype: torch.dtype) -> str:
    """The kind of product for weights of this dtype on this processor."""
    if dtype == torch.int8:
        return "int8-dots" if multiplies("int8-dots") else "int8-widened"
    if dtype == torch.bfloat16:
        if multiplies("bf16-tiles"):
            return "bf16-tiles"
        return "bf16-dots" if binding.loaded().dlm_half_dots_pay() else "bf16-widened"
    return "float32"


def panel_width() -> int:
    """Outputs of a panel: twice the vectors' width."""
    return binding.loaded().dlm_panel()


def whole_product(w: WholeWeight, bias: Float[Tensor, " n"] | None = None) -> Product:
    """A product of a weight in panels of `panel_width`; all three tensors must be kept."""
    pointer = None if bias is None else bias.data_ptr()
    kind = KINDS.index(fastest(torch.int8) if w.panels.dtype == torch.int8 else "int16-dots")
    return Product(None, w.panels.data_ptr(), pointer, *w.shape, 0, kind, w.scales.data_ptr())


def words(w: Tensor) -> Float[Tensor, "n words"]:
    """A weight (n, k) as C reads it: rows of 32-bit words, which hold one float32, two bfloat16 or four int8."""
    return w if w.dtype == torch.float32 else w.view(torch.float32)


def panels(w: Float[Tensor, "n words"]) -> Float[Tensor, "p words width"]:
    """A weight's words as products read them fastest: a copy."""
    width = panel_width()
    n, k = w.shape
    out = torch.empty(-(-n // width), k, width)
    binding.call("dlm_panels", w, w.stride(0), n, k, out)
    return out


def room_for(rows: int, threads: int) -> int:
    """How many floats a product of so many rows needs to work in."""
    return binding.loaded().dlm_room(rows, threads)


def linear(
    product: Product, x: Float[Tensor, "m k"], room: Float[Tensor, " floats"] | None = None
) -> Float[Tensor, "m n"]:
    """x w^T + bias. A row's numbers do not depend on the other rows, nor on how many there are.

    It works in `room` if it is given and large enough.
    """
    x, threads = x.contiguous(), threads_now()
    m, k = x.shape
    out, floats = torch.empty(m, product.n), room_for(m, threads)
    if room is None or len(room) < floats:
        room = torch.empty(floats)
    binding.loaded().dlm_linear(ctypes.byref(product), x.data_ptr(), k, out.data_ptr(), m, room.data_ptr(), threads)
    return out


def gated(gate: Product, up: Product, x: Float[Tensor, "m k"]) -> Float[Tensor, "m f"]:
    """silu(x gate^T) * (x up^T)."""
    x, threads = x.contiguous(), threads_now()
    m, k = x.shape
    out, wide, room = torch.empty(m, gate.n), torch.empty(m, gate.n), torch.empty(room_for(m, threads))
    given = x.data_ptr(), k, out.data_ptr(), m, wide.data_ptr(), room.data_ptr(), threads
    binding.loaded().dlm_gated(ctypes.byref(gate), ctypes.byref(up), *given)
    return out


def layers_room(network: Network, rows: int, spans: int) -> int:
    """How many floats `layers` needs to work in; the network says on how many threads."""
    return binding.loaded().dlm_layers_room(ctypes.byref(network), rows, spans)


def layers(
    network: Network,
    layers: ctypes.Array[Layer],
    run: Run,
    norm: Float[Tensor, " d"],
    table: Float[Tensor, "v d"],
    ids: Int[Tensor, " n"],
    output_rows: Int[Tensor, " w"],
    out: Float[Tensor, "w d"],
    tapped: Int[Tensor, " m"] | None = None,
    taps: Float[Tensor, "n m d"] | None = None,
) -> None:
    """See dlm.inference.fused: final hidden states of the `output_rows`, from the rows of a table that ids name.

    `taps` is filled with the outputs of the `tapped` layers.
    """
    shared = ctypes.byref(network), ctypes.byref(layers), ctypes.byref(run)
    given = (
        norm.data_ptr(),
        table.data_ptr(),
        table.shape[0],
        ids.data_ptr(),
        output_rows.data_ptr(),
        out.shape[0],
        out.data_ptr(),
        *((None, 0, None) if tapped is None or taps is None else (tapped.data_ptr(), len(tapped), taps.data_ptr())),
    )
    if (place := binding.loaded().dlm_layers(*shared, *given)) >= 0:
        raise IndexError(f"token {int(ids[place])} is not in a vocabulary of {table.shape[0]}")
