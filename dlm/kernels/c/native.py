"""The kernels for a CPU, in C: compiled when they are first needed, kept for the next time.

DLM_NATIVE=0 switches them off; DLM_NATIVE=1 makes it an error that they cannot be had.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.errors import UserError
from dlm.kernels import reference
from dlm.kernels.c.built import LOG, load
from dlm.kernels.c.compiler import BuildError, NoCompiler, Unfinished, compiler
from dlm.kernels.c.structs import Layer, Network, Product, Run, check_sizes
from dlm.kernels.int8 import WholeWeight
from dlm.kernels.picked import Picked
from dlm.kernels.spans import Spans
from dlm.kernels.threads import threads_now

SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".c", ".h"))
FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"],
    "AVX2": ["-mavx2", "-mfma"],
}
"""By what torch itself uses of the CPU; nothing for others."""
_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "dlm_sizes": [_P],
    "dlm_rms_norm": [_P, _I, _I, _P, _P, _F, _P, _P, _I, _I, _I, _N],
    "dlm_rotate": [_P, _I, _P, _P, _P, _I, _I, _I, _I, _N],
    "dlm_write": [_P, _I, _P, _I, _P, _P, _P, _P, _P, _I, _I, _I, _I, _N],
    "dlm_paged_attention": [_P, _I, _P, _P, _N, *[_P] * 4, _I, *[_P] * 4, *[_I] * 6, _F, _N],
    "dlm_panel": [],
    "dlm_multiplies": [_I],
    "dlm_half_dots_pay": [],
    "dlm_room": [_I, _N],
    "dlm_attention_room": [_I, _I, _N],
    "dlm_layers_room": [_P, _I, _I],
    "dlm_panels": [_P, _I, _I, _I, _P, _N],
    "dlm_linear": [_P, _P, _I, _P, _I, _P, _N],
    "dlm_gated": [_P, _P, _P, _I, _P, _I, _P, _P, _N],
    "dlm_layers": [_P, _P, _P, _P, _P, _I, _P, _P, _I, _P, _P, _I, _P],
    "dlm_norm": [_P, _P, _F, _P, _P, _I, _I, _N],
    "dlm_norm_back": [*[_P] * 6, _I, _I, _N],
    "dlm_gate": [*[_P] * 3, _I, _N],
    "dlm_gate_back": [*[_P] * 5, _I, _N],
    "dlm_half_available": [],
    "dlm_half_room": [_N],
    "dlm_largest": [_P, _I, _I, _I],
    "dlm_half_product": [_P, _I, _I, _P, _I, _I, _P, _I, _I, _I, _F, _F, _P, _N],
    "dlm_confidence": [_P, _I, _I, _N, _F, *[_P] * 12, _I, _I, _N],
}
RESULTS: dict[str, type] = dict.fromkeys(
    ("dlm_panel", "dlm_room", "dlm_attention_room", "dlm_layers_room", "dlm_layers", "dlm_half_room", "dlm_confidence"),
    _I,
) | {"dlm_half_available": _N, "dlm_multiplies": _N, "dlm_half_dots_pay": _N, "dlm_largest": _F}
OPENMP = ", OpenMP"


def unavailable() -> str | None:
    """Why the kernels cannot be used now; None where they can. UserError if DLM_NATIVE=1 and they could not be built."""
    switch = os.environ.get("DLM_NATIVE")
    if switch == "0":
        return "DLM_NATIVE = 0 switches the kernels in C off"
    found, how = library()
    if found is None:
        if switch == "1":
            raise UserError(f"DLM_NATIVE = 1 demands the kernels in C, and they cannot be had: {how}")
        return how
    if OPENMP not in how and torch.get_num_threads() > 1:
        return f"built without OpenMP they serve one thread, and torch uses {torch.get_num_threads()}"
    return None


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernels, and how they were compiled; or None, and why not: what a user can mend is also logged, once."""
    if os.name != "posix":
        return None, f"they are not built on {os.name}"
    capability = torch.backends.cpu.get_cpu_capability()
    common = ["-std=gnu11", "-O3", "-fPIC", "-shared", *FLAGS.get(capability, [])]
    demanded = os.environ.get("DLM_NATIVE") == "1"
    try:
        command = compiler()
        try:
            found, openmp = load("native", SOURCES, command, [*common, "-fopenmp"], SIGNATURES), OPENMP
        except Unfinished:
            raise
        except BuildError:  # Apple's clang has no OpenMP
            found, openmp = load("native", SOURCES, command, common, SIGNATURES), ", one thread"
    except BuildError as error:
        if not (demanded or isinstance(error, NoCompiler)):  # an error already, and no surprise
            LOG.warning("the kernels in C are not used: %s; torch's own do their work, slower", error)
        return None, str(error)
    declare(found)
    return found, f"{' '.join(command)}, {capability}{openmp}"


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes what the functions take, and check that the structs are alike."""
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes, getattr(library, name).restype = types, RESULTS.get(name)
    check_sizes(library)


KINDS = ("float32", "bf16-widened", "bf16-dots", "bf16-tiles", "int8-widened", "int8-dots", "int16-dots")
"""What products multiply and how, in the order of kernels.h: weights made floats, pairs and quads summed by one
instruction, AMX."""


def multiplies(kind: str) -> bool:
    """Whether this processor has what the kind needs, and the library was compiled for it."""
    return bool(_library().dlm_multiplies(KINDS.index(kind)))


def fastest(dtype: torch.dtype) -> str:
    """The kind of product for weights of this dtype on this processor."""
    if dtype == torch.int8:
        return "int8-dots" if multiplies("int8-dots") else "int8-widened"
    if dtype == torch.bfloat16:
        if multiplies("bf16-tiles"):
            return "bf16-tiles"
        return "bf16-dots" if _library().dlm_half_dots_pay() else "bf16-widened"
    return "float32"


def panel_width() -> int:
    """Outputs of a panel: twice the vectors' width."""
    return _library().dlm_panel()


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
    _call("dlm_panels", w, w.stride(0), n, k, out)
    return out


def room_for(rows: int, threads: int) -> int:
    """How many floats a product of so many rows needs to work in."""
    return _library().dlm_room(rows, threads)


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
    _library().dlm_linear(ctypes.byref(product), x.data_ptr(), k, out.data_ptr(), m, room.data_ptr(), threads)
    return out


def gated(gate: Product, up: Product, x: Float[Tensor, "m k"]) -> Float[Tensor, "m f"]:
    """silu(x gate^T) * (x up^T)."""
    x, threads = x.contiguous(), threads_now()
    m, k = x.shape
    out, wide, room = torch.empty(m, gate.n), torch.empty(m, gate.n), torch.empty(room_for(m, threads))
    given = x.data_ptr(), k, out.data_ptr(), m, wide.data_ptr(), room.data_ptr(), threads
    _library().dlm_gated(ctypes.byref(gate), ctypes.byref(up), *given)
    return out


def layers_room(network: Network, rows: int, spans: int) -> int:
    """How many floats `layers` needs to work in; the network says on how many threads."""
    return _library().dlm_layers_room(ctypes.byref(network), rows, spans)


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
    if (place := _library().dlm_layers(*shared, *given)) >= 0:
        raise IndexError(f"token {int(ids[place])} is not in a vocabulary of {table.shape[0]}")


def _library() -> ctypes.CDLL:
    found = library()[0]
    assert found is not None, "ask unavailable() first"
    return found


def _call(name: str, *arguments: Tensor | float | None, threads: int | None = None) -> Any:
    """Tensors go by their address."""
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    return getattr(_library(), name)(*given, threads_now() if threads is None else threads)


def rms_norm(
    x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float, residual: Float[Tensor, "n d"] | None = None
) -> tuple[Tensor, Tensor]:
    """As in dispatch; without a residual x may also be (n, h, d), and of any layout whose last axis is dense."""
    wide = x if x.ndim == 3 else x.reshape(-1, 1, x.shape[-1])
    if wide.stride(-1) != 1:
        wide = wide.contiguous()
    out = torch.empty(x.shape)
    total = x if residual is None else torch.empty(x.shape)
    if residual is not None:
        residual = residual.contiguous()
    n, h, d = wide.shape
    strides = wide.stride(0), wide.stride(1)
    _call("dlm_rms_norm", wide, *strides, residual, weight.contiguous(), eps, out, total, n, h, d)
    return out, total


def rope_write(
    q: Float[Tensor, "n h e"],
    k: Float[Tensor, "n g e"],
    v: Float[Tensor, "n g e"],
    cos: Float[Tensor, "n r"] | None,
    sin: Float[Tensor, "n r"] | None,
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    slots: Int[Tensor, " n"],
    q_weight: Float[Tensor, " e"] | None = None,
    k_weight: Float[Tensor, " e"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "n h e"]:
    """As in dispatch."""
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps)[0], rms_norm(k, k_weight, eps)[0]
    q, k, v = (_rows(x) for x in (q, k, v))
    if cos is not None and sin is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
    out, (n, h, e), r = torch.empty(q.shape), q.shape, 0 if cos is None else cos.shape[1]
    _call("dlm_rotate", q, q.stride(0), cos, sin, out, n, h, e, r)
    _call("dlm_write", k, k.stride(0), v, v.stride(0), cos, sin, slots, k_pages, v_pages, n, k.shape[1], e, r)
    return out


def paged_attention(
    q: Float[Tensor, "n h e"],
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    spans: Spans,
    block_length: int | None,
    scale: float | None = None,
    rows: Int[Tensor, " w"] | None = None,
) -> Float[Tensor, "w h e"]:
    """As in dispatch; of the `rows` only, in ascending order, where they are given. Pages may be bfloat16."""
    q = _rows(q)
    n, h, e = q.shape
    rows = torch.arange(n) if rows is None else rows
    starts, positions, visible, tables, block_lengths = spans.packed(block_length)
    threads = threads_now()
    out, room = torch.empty(len(rows), h, e), torch.empty(_library().dlm_attention_room(len(visible), e, threads))
    shape = len(visible), len(rows), h, k_pages.shape[2], e, k_pages.shape[1], e**-0.5 if scale is None else scale
    half = int(k_pages.dtype == torch.bfloat16)
    inputs = (
        q,
        q.stride(0),
        k_pages,
        v_pages,
        half,
        starts,
        positions,
        visible,
        tables,
        tables.shape[1],
        block_lengths,
        rows,
    )
    _call("dlm_paged_attention", *inputs, out, room, *shape, threads=threads)
    return out


def confidence(
    logits: Float[Tensor, "n v"],
    *,
    mask_id: int | None,
    keep_mask: bool = True,
    temperature: float = 0.0,
    **address: Int[Tensor, " n"] | None,
) -> Picked:
    """As in dispatch. A draw that the last bits of a logarithm decide is torch's."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    n, v = logits.shape
    token, finite = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.bool)
    first, second, entropy = torch.empty(n), torch.empty(n), torch.empty(n)
    mask, chosen, p = -1 if mask_id is None else mask_id, token, first
    unsure: Any = None
    where: list[Any] = [None] * 4
    if temperature > 0:
        chosen, p, unsure = torch.empty(n, dtype=torch.int64), torch.empty(n), torch.empty(n, dtype=torch.bool)
        where = [address[name] for name in ("seed", "sample", "step", "position")]
        if any(x.dtype != torch.int64 or x.stride(0) != 1 for x in where):
            where = [x.to(torch.int64).contiguous() for x in where]
    given = logits, logits.stride(0), mask, int(keep_mask), temperature, *where, token, first, second, entropy, finite
    if _call("dlm_confidence", *given, chosen, p, unsure, n, v):
        rows = unsure.nonzero()[:, 0]
        own = {name: None if x is None else x[rows] for name, x in address.items()}
        twin = reference.confidence(logits[rows], mask_id=mask_id, keep_mask=keep_mask, temperature=temperature, **own)
        chosen[rows], p[rows] = twin.token, twin.p
    return Picked(token=chosen, p=p, first=first, first_token=token, second=second, entropy=entropy, finite=finite)


def _rows(x: Float[Tensor, "n h e"]) -> Float[Tensor, "n h e"]:
    """With dense rows."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
