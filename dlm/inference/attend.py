"""Attention of a packed forward over the page pool: keys are written, then each row looks at its request's pages."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm.inference.layout import Layout
from dlm.kernels.dispatch import paged_attention, rope_write
from dlm.models.attention import Attend, rotate_into


def paged_attend(layout: Layout) -> Attend:
    """The `Attend` of a layout: fused kernels on a GPU, views of the pool and SDPA elsewhere."""
    return _kernels(layout) if layout.device.type == "cuda" else _views(layout)


def _kernels(layout: Layout) -> Attend:
    """Two launches a layer: rotate and write, then look."""
    pool, spans, slots = layout.pool, layout.spans, layout.slots
    cos, sin = (None, None) if layout.rope is None else (table[0, :, 0] for table in layout.rope)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = pool.k[layer], pool.v[layer]
        turned = rope_write(q[0], k[0], v[0], cos, sin, keys, values, slots)
        return paged_attention(turned, keys, values, spans, None)[None]

    return attend


def _views(layout: Layout) -> Attend:
    """A request's pages that are neighbours are one view of the pool: nothing is gathered."""
    pool = layout.pool
    keys, values = pool.k.flatten(1, 2), pool.v.flatten(1, 2)  # (layers, slots, g, e)
    rows, slots = layout.written
    scattered = slots if isinstance(slots, Tensor) else None
    pieces = list(zip(layout.pieces, layout.indices, layout.masks, strict=True))
    cos, sin = layout.turn

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        all_keys, all_values = keys[layer], values[layer]
        q, k, v = q[0], k[0], v[0]
        if cos is not None and sin is not None:
            turned = torch.empty_like(q)
            rotate_into(turned, q, cos, sin)
            q = turned
        if scattered is None:
            if cos is None or sin is None:
                all_keys[slots] = k[rows]
            else:
                rotate_into(all_keys[slots], k[rows], cos[rows], sin[rows])
            all_values[slots] = v[rows]
        else:
            if cos is not None and sin is not None:
                turned = torch.empty_like(k)
                rotate_into(turned, k, cos, sin)
                k = turned
            all_keys.index_copy_(0, scattered, k[rows])
            all_values.index_copy_(0, scattered, v[rows])
        grouped = q.shape[1] != k.shape[1]
        heads = q.transpose(0, 1)[None]  # (1, h, n, e)
        found = []
        for piece, index, mask in pieces:
            seen, told = all_keys[index].transpose(0, 1), all_values[index].transpose(0, 1)  # (g, k, e)
            asking = heads if len(pieces) == 1 else heads[:, :, piece.start : piece.stop]
            out = F.scaled_dot_product_attention(asking, seen[None], told[None], attn_mask=mask, enable_gqa=grouped)
            found.append(out.transpose(1, 2))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    return attend
