"""Drafter `dflash`: a DFlash draft over pages of its own that have the same numbers as the target's.

The draft's keys of a position lie on the page that holds the target's, and are there exactly where those are final: so
requests with the same beginning share them, and parked requests take them along.
"""

from collections.abc import Sequence as Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlm.inference.drafting.choosing import Choosing
from dlm.inference.drafting.drafter import Guess, Plain, Wish
from dlm.inference.forward import Forward
from dlm.inference.fused import FusedLayers, freeze
from dlm.inference.layout import Layout, lengthen_rope, rope_rows
from dlm.inference.pages import PagePool
from dlm.inference.scheduler import Scheduled
from dlm.inference.spans import Span
from dlm.inference.transfers import Transfers
from dlm.models.attention import rotate
from dlm.models.draft import Draft

if TYPE_CHECKING:
    from dlm.inference.compute import Compute
    from dlm.inference.sequence import Sequence


class DFlash(Plain):
    """A draft's forward for all requests at once: each one's anchor and masks, over the context on its pages."""

    name = "dflash"
    marks = "dflash"

    def __init__(self, draft: Draft, pool: PagePool, compute: "Compute") -> None:
        self.draft, self.compute = draft, compute
        self.most, self.taps = draft.config.block_size - 1, draft.config.target_layer_ids
        self.body = draft.body()
        target = draft.target
        self.pool = PagePool(self.body, pool.num_pages, pool.page_size, target.device, target.dtype)
        self.transfers = Transfers(target.device)
        if self.transfers.remote:  # now, since making it keeps the host waiting
            lengthen_rope(self.body, self.pool, target.config.context_length)
        self._freeze()

    def propose(self, wishes: Sized[Wish]) -> list[Guess]:
        sizes = [wish.rows for wish in wishes]
        spans = [
            Scheduled(wish.sequence, Span(range(wish.anchor, wish.anchor + size), wish.anchor + size))
            for wish, size in zip(wishes, sizes, strict=True)
        ]
        layout = Layout(spans, self.pool, self.body, attention_block=None)
        ids = np.full(layout.rows, self.draft.config.mask_token_id, np.int64)
        starts = np.cumsum([0, *sizes[:-1]])
        ids[starts] = [wish.sequence.canvas.tokens[wish.anchor] for wish in wishes]
        rows = np.concatenate([start + 1 + np.arange(wish.count) for start, wish in zip(starts, wishes, strict=True)])
        choosing = Choosing(wishes, self.draft.candidate_selector)
        run = self._run if self.draft.config.plain else self._run_apart
        return choosing.guesses(*run(layout, ids, rows, sizes, choosing.arrays))

    def absorb(self, scheduled: Sized[Scheduled], forward: Forward) -> None:
        layout = forward.layout
        assert forward.taps is not None
        rows = np.concatenate([_context_rows(item, layout) for item in scheduled])
        if not len(rows):
            return
        whole = len(rows) == layout.rows
        x = self.transfers.up(
            {"rows": rows, "slots": layout.host_slots[rows], "positions": layout.host_positions[rows]}
        )
        taps, slots = forward.taps if whole else forward.taps.index_select(0, x["rows"]), x["slots"]
        rope = rope_rows(self.body, self.pool, x["positions"], layout.furthest)
        assert rope is not None
        cos, sin = (table[0] for table in rope)
        context = self.draft.context(taps.flatten(1))
        for number, (keys, values) in enumerate(self.draft.keys_values(context)):
            self.pool.k[number].flatten(0, 1).index_copy_(0, slots, rotate(keys, cos, sin))
            self.pool.v[number].flatten(0, 1).index_copy_(0, slots, values)

    def park(self, seq: "Sequence") -> Any:
        return [self.pool.read(table) for table in seq.pages.tables]

    def resume(self, seq: "Sequence", parked: Any) -> None:
        for table, content in zip(seq.pages.tables, parked, strict=True):
            self.pool.write(table, content)

    def reload(self) -> None:
        self.body = self.draft.body()
        self._freeze()

    def close(self) -> None:
        self.pool.close()

    def _freeze(self) -> None:
        shared = self.compute.fused
        plain = self.draft.config.plain and shared is not None
        whole = self.draft.tokens is None
        frozen = freeze(self.body, shared.frozen if whole else None) if plain and shared is not None else None
        self.fused = None if frozen is None else FusedLayers(self.body, frozen, keep_tokens=False)
        self.graphs = self.compute.recorder(self.body)

    def _run(
        self, layout: Layout, ids: np.ndarray, rows: np.ndarray, sizes: list[int], more: dict[str, np.ndarray]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Final states and logits of some rows, and `more` on the device."""
        forward = Forward(self.body, layout, self.compute.path, self.fused, deterministic=self.compute.deterministic)
        hidden = None if self.graphs is None else self.graphs.run(layout, ids, rows)
        if isinstance(hidden, Tensor):
            x = self.transfers.up(more) if more else {}
        else:
            x = self.transfers.up(forward.arrays(ids, rows) | more)
            hidden = forward(x)
        return hidden, self.draft.scaled(forward.head(hidden)), x

    def _run_apart(
        self, layout: Layout, ids: np.ndarray, rows: np.ndarray, sizes: list[int], more: dict[str, np.ndarray]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The same for a draft whose layers are not a plain network's: attention sees one request after the other."""
        size = self.pool.page_size
        slots = [np.asarray(p.table)[:, None] * size + np.arange(size) for p in layout.pieces]
        seen = {
            f"seen {n}": x.reshape(-1)[: p.visible] for n, (x, p) in enumerate(zip(slots, layout.pieces, strict=True))
        }
        own = {"ids": ids, "rows": rows, "place": np.concatenate([np.arange(size) for size in sizes])}
        own |= {"slots": layout.host_slots, "positions": layout.host_positions}
        x = self.transfers.up(own | seen | more)
        states = self.draft.run(self.draft.embedded(x["ids"]), self._attend(layout, x), x["place"])
        hidden = states.index_select(0, x["rows"])
        head = None if self.draft.tokens is not None else self.compute.fused
        return hidden, self.draft.scaled(self.body.head(hidden) if head is None else head.head(hidden)), x

    def _attend(self, layout: Layout, x: dict[str, Tensor]) -> Any:
        rope = rope_rows(self.body, self.pool, x["positions"], layout.furthest)
        assert rope is not None
        cos, sin = (table[0] for table in rope)
        heights = [torch.arange(piece.visible, device=x["ids"].device) for piece in layout.pieces]

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.pool.k[number].flatten(0, 1), self.pool.v[number].flatten(0, 1)
            keys.index_copy_(0, x["slots"], rotate(k, cos, sin))
            values.index_copy_(0, x["slots"], v)
            queries, found = rotate(q, cos, sin), []
            for n, piece in enumerate(layout.pieces):
                index, mine = x[f"seen {n}"], slice(piece.start, piece.stop)
                seen = self.draft.sight(number, x["positions"][mine], heights[n])
                heads = (queries[mine], keys[index], values[index])
                parts = [part.transpose(0, 1)[None] for part in heads]
                grouped = q.shape[1] != k.shape[1]
                out = F.scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=grouped)
                found.append(out[0].transpose(0, 1))
            return torch.cat(found)

        return attend


def _context_rows(item: Scheduled, layout: Layout) -> np.ndarray:
    """The rows whose states become the draft's context: those whose keys the target wrote."""
    start = layout.first_rows[item.sequence.number]
    rows = start + np.arange(len(item.span.positions))
    return rows[layout.host_slots[rows] >= 0]
