"""Attention of a packed forward over the page pool: keys are written, then each row looks at its request's pages."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm.inference.layout import Layout
from dlm.models.attention import Attend, rotate


def paged_attend(layout: Layout) -> Attend:
    """The `Attend` of a layout: fused kernels on a GPU, views of the pool and SDPA elsewhere."""
    return _views(layout)


def _views(layout: Layout) -> Attend:
    """A request's pages that are neighbours are one view of the pool: nothing is gathered."""
    pool = layout.pool
    keys, values = pool.k.flatten(1, 2), pool.v.flatten(1, 2)  # (layers, slots, g, e)
    rows, slots = layout.written
    pieces = list(zip(layout.pieces, layout.indices, layout.masks, strict=True))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layout.rope is not None:
            q, k = rotate(q, *layout.rope), rotate(k, *layout.rope)
        all_keys, all_values = keys[layer], values[layer]
        if isinstance(rows, slice):
            all_keys[slots] = k[0, rows]
            all_values[slots] = v[0, rows]
        else:
            all_keys.index_copy_(0, slots, k[0, rows])
            all_values.index_copy_(0, slots, v[0, rows])
        grouped = q.shape[2] != k.shape[2]
        heads = q[0].transpose(0, 1)  # (h, n, e)
        found = []
        for piece, index, mask in pieces:
            seen, told = all_keys[index].transpose(0, 1), all_values[index].transpose(0, 1)  # (g, k, e)
            out = F.scaled_dot_product_attention(
                heads[None, :, piece.start : piece.stop], seen[None], told[None], attn_mask=mask, enable_gqa=grouped
            )
            found.append(out.transpose(1, 2))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    return attend
