"""Single kernels in C, as `dispatch` names them: norm, rotation and write, paged attention, confidence."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.kernels import reference
from dlm.kernels.c import binding
from dlm.kernels.picked import Picked
from dlm.kernels.spans import Spans
from dlm.kernels.threads import threads_now


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
    binding.call("dlm_rms_norm", wide, *strides, residual, weight.contiguous(), eps, out, total, n, h, d)
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
    binding.call("dlm_rotate", q, q.stride(0), cos, sin, out, n, h, e, r)
    binding.call("dlm_write", k, k.stride(0), v, v.stride(0), cos, sin, slots, k_pages, v_pages, n, k.shape[1], e, r)
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
    out, room = torch.empty(len(rows), h, e), torch.empty(binding.loaded().dlm_attention_room(len(visible), e, threads))
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
    binding.call("dlm_paged_attention", *inputs, out, room, *shape, threads=threads)
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
    if binding.call("dlm_confidence", *given, chosen, p, unsure, n, v):
        rows = unsure.nonzero()[:, 0]
        own = {name: None if x is None else x[rows] for name, x in address.items()}
        twin = reference.confidence(logits[rows], mask_id=mask_id, keep_mask=keep_mask, temperature=temperature, **own)
        chosen[rows], p[rows] = twin.token, twin.p
    return Picked(token=chosen, p=p, first=first, first_token=token, second=second, entropy=entropy, finite=finite)


def _rows(x: Float[Tensor, "n h e"]) -> Float[Tensor, "n h e"]:
    """With dense rows."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
