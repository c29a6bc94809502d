"""Attention of a packed forward over the page pool: keys are written, then each row attends to its request's pages."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dlm.inference.layout import Layout
from dlm.inference.pages import PagePool
from dlm.kernels.dispatch import paged_attention, rope_write
from dlm.kernels.paths import path_of
from dlm.kernels.spans import Spans
from dlm.models.attention import Attend, HeadNorms, Rope, rotate_into


class PagedAttend:
    """By the path's kernels: norm, rotate and write in one launch, then attend."""

    def __init__(self, pool: PagePool, rope: Rope | None, slots: Int[Tensor, " n"], spans: Spans) -> None:
        self.pool, self.slots, self.spans = pool, slots, spans
        self.cos, self.sin = (None, None) if rope is None else (table[0, :, 0] for table in rope)
        self.takes_norms = path_of(pool.k).fuses

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms | None = None) -> Tensor:
        keys, values = self.pool.k[layer], self.pool.v[layer]
        q_weight, k_weight, eps = norms or (None, None, 0.0)
        rotated = rope_write(q, k, v, self.cos, self.sin, keys, values, self.slots, q_weight, k_weight, eps)
        return paged_attention(rotated, keys, values, self.spans, None)


def viewed_attend(layout: Layout) -> Attend:
    """By torch's attention. A request's pages that are neighbours are one view of the pool: nothing is gathered.

    All views are taken once, since a layout serves every step of a block.
    """
    pool = layout.pool
    layers = [_Layer(layout, k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(pool.k, pool.v, strict=True)]
    cos, sin = layout.rotation

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if cos is not None and sin is not None:
            q = rotate_into(torch.empty_like(q), q, cos, sin)
        return layers[layer].attend(q, k, v)

    return attend


class _Layer:
    """One layer's part of the pool as a layout writes and reads it: keys and values are (slots, g, e)."""

    def __init__(self, layout: Layout, keys: Tensor, values: Tensor) -> None:
        self.pieces, self.masks, self.indices = layout.pieces, layout.masks, layout.indices
        self.keys, self.values = keys, values
        self.rows, self.slots = layout.written
        self.cos, self.sin = layout.rotation
        self.whole = isinstance(self.rows, slice) and self.rows == slice(0, layout.rows)
        if isinstance(self.slots, slice):
            self.new_keys, self.new_values = keys[self.slots], values[self.slots]
        if self.cos is not None and self.sin is not None and not self.whole:
            self.cos, self.sin = self.cos[self.rows], self.sin[self.rows]
        self.views = [self._view(index) if isinstance(index, slice) else None for index in self.indices]

    def attend(self, q: Float[Tensor, "n h e"], k: Float[Tensor, "n g e"], v: Float[Tensor, "n g e"]) -> Tensor:
        """Write the rows' keys and values; then each piece's rows attend to theirs."""
        self._write(k, v)
        heads, grouped = q.transpose(0, 1)[None], q.shape[1] != k.shape[1]  # (1, h, n, e)
        found = []
        for piece, view, index, mask in zip(self.pieces, self.views, self.indices, self.masks, strict=True):
            keys, values = view or self._view(index)
            queries = heads if len(self.pieces) == 1 else heads[:, :, piece.start : piece.stop]
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
            found.append(out[0].transpose(0, 1))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _view(self, index: slice | Tensor) -> tuple[Tensor, Tensor]:
        """(1, g, k, e) each."""
        return self.keys[index].transpose(0, 1)[None], self.values[index].transpose(0, 1)[None]

    def _write(self, k: Tensor, v: Tensor) -> None:
        if not self.whole:
            k, v = k[self.rows], v[self.rows]
        cos, sin = self.cos, self.sin
        if isinstance(self.slots, slice):
            self.new_keys.copy_(k) if cos is None or sin is None else rotate_into(self.new_keys, k, cos, sin)
            self.new_values.copy_(v)
            return
        if cos is not None and sin is not None:
            k = rotate_into(torch.empty_like(k), k, cos, sin)
        self.keys.index_copy_(0, self.slots, k)
        self.values.index_copy_(0, self.slots, v)
