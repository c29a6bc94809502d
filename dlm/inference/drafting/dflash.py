"""Drafter `dflash`: a DFlash draft over pages of its own that have the same numbers as the target's.

The draft's keys of a position lie on the page that holds the target's, and are there exactly where those are final: so
requests with the same beginning share them, and parked requests take them along.
"""

from collections.abc import Sequence as Sized
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dlm.diffusion.choose import Address, argmax, choose, distribution
from dlm.diffusion.rng import Purpose, gumbel
from dlm.diffusion.speculate import Drawn, draw
from dlm.inference.drafting.addresses import addresses
from dlm.inference.drafting.drafter import Guess, Plain, Wish
from dlm.inference.forward import Forward
from dlm.inference.fused import FusedLayers, freeze
from dlm.inference.layout import Layout, rope_rows
from dlm.inference.pages import PagePool
from dlm.inference.scheduler import Scheduled
from dlm.inference.spans import Span
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
        hidden, logits = self._run(layout, ids, rows, np.concatenate([np.arange(size) for size in sizes]))
        return self._guesses(wishes, hidden, logits)

    def absorb(self, scheduled: Sized[Scheduled], forward: Forward) -> None:
        layout = forward.layout
        assert forward.taps is not None
        rows = np.concatenate([_context_rows(item, layout) for item in scheduled])
        if not len(rows):
            return
        whole = len(rows) == layout.rows
        index = layout.upload(rows)
        taps = forward.taps if whole else forward.taps.index_select(0, index)
        slots = layout.slots if whole else layout.slots.index_select(0, index)
        rope = rope_rows(self.body, self.pool, layout.positions[index], int(layout.host_positions.max()))
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

    def _run(self, layout: Layout, ids: np.ndarray, rows: np.ndarray, place: np.ndarray) -> tuple[Tensor, Tensor]:
        """Final states and logits of some rows."""
        path = self.compute.path
        if self.draft.config.plain:
            forward = Forward(self.body, layout, path, self.fused, deterministic=self.compute.deterministic)
            hidden = forward(self.compute.transfers.up(forward.arrays(ids, rows)))
            return hidden, self.draft.scaled(forward.head(hidden))
        embedded = self.draft.embedded(layout.upload(ids))
        hidden = self.draft.run(embedded, self._attend(layout), layout.upload(place))[layout.upload(rows)]
        head = None if self.draft.tokens is not None else self.compute.fused
        return hidden, self.draft.scaled(self.body.head(hidden) if head is None else head.head(hidden))

    def _attend(self, layout: Layout) -> Any:
        """Attention of a draft whose layers differ in what they see: one request after the other."""
        cos, sin = (None, None) if layout.rope is None else (table[0] for table in layout.rope)
        assert cos is not None and sin is not None
        size = self.pool.page_size

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.pool.k[number].flatten(0, 1), self.pool.v[number].flatten(0, 1)
            keys.index_copy_(0, layout.slots, rotate(k, cos, sin))
            values.index_copy_(0, layout.slots, v)
            queries, found = rotate(q, cos, sin), []
            for piece in layout.pieces:
                slots = (np.asarray(piece.table)[:, None] * size + np.arange(size)).reshape(-1)[: piece.visible]
                index, mine = layout.upload(slots), slice(piece.start, piece.stop)
                seen = self.draft.sight(number, layout.positions[mine], torch.arange(piece.visible, device=q.device))
                heads = (queries[mine], keys[index], values[index])
                parts = [x.transpose(0, 1)[None] for x in heads]
                grouped = q.shape[1] != k.shape[1]
                out = F.scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=grouped)
                found.append(out[0].transpose(0, 1))
            return torch.cat(found)

        return attend

    def _guesses(self, wishes: Sized[Wish], hidden: Float[Tensor, "n d"], logits: Float[Tensor, "n v"]) -> list[Guess]:
        """Tokens of each wish from its rows; requests with the same settings are chosen for together."""
        guesses: list[Guess | None] = [None] * len(wishes)
        ends = np.cumsum([wish.count for wish in wishes])
        kinds = list(dict.fromkeys(map(_kind, wishes)))  # in an order that processes agree on
        order = sorted(range(len(wishes)), key=lambda i: kinds.index(_kind(wishes[i])))
        for kind, members in groupby(order, key=lambda i: _kind(wishes[i])):
            mine = list(members)
            if len(mine) == len(wishes):
                mine, states, scores = list(range(len(wishes))), hidden, logits
            else:
                rows = np.concatenate([np.arange(ends[i] - wishes[i].count, ends[i]) for i in mine])
                index = torch.from_numpy(rows).to(logits.device)
                states, scores = hidden.index_select(0, index), logits.index_select(0, index)
            own = [wishes[i] for i in mine]
            for i, guess in zip(mine, self._chosen(own, states, scores, *kind), strict=True):
                guesses[i] = guess
        return [guess for guess in guesses if guess is not None]

    def _chosen(
        self,
        wishes: list[Wish],
        hidden: Tensor,
        logits: Tensor,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        verify: str,
    ) -> list[Guess]:
        counts = [wish.count for wish in wishes]
        address = addresses(wishes, logits.device) if temperature > 0 else None
        drawn = None
        if self.draft.candidate_selector is not None:
            tokens, drawn = self._walk(wishes, hidden, logits, temperature, verify, address)
        elif address is None:
            tokens = argmax(logits)
        elif verify == "match":  # the same noise as the target's: where the two agree, so do their draws
            tokens = choose(
                logits, mask_id=None, temperature=temperature, top_k=top_k, top_p=top_p, address=address, check=False
            ).token
        else:
            drawn = Drawn(distribution(logits, temperature, top_k, top_p))
            tokens = draw(drawn.p, Purpose.DRAFT, address)
        parts = np.split(tokens.cpu().numpy(), np.cumsum(counts)[:-1])
        ends = np.cumsum(counts)
        rows = [slice(int(end) - count, int(end)) for count, end in zip(counts, ends, strict=True)]
        found = [None if drawn is None else drawn.rows(row) for row in rows]
        return [Guess(part, own, forwards=1) for part, own in zip(parts, found, strict=True)]

    def _walk(
        self,
        wishes: list[Wish],
        hidden: Tensor,
        logits: Tensor,
        temperature: float,
        verify: str,
        address: Address | None,
    ) -> tuple[Int[Tensor, " n"], Drawn | None]:
        """DFlash 2: each token among its position's candidates, after the one chosen before it."""
        selector = self.draft.candidate_selector
        assert selector is not None
        values, candidates = selector.candidates(logits)
        noise = None
        if address is not None and verify == "match":
            noise = gumbel(**vars(address), vocab_size=logits.shape[-1]).gather(-1, candidates)
        counts = [wish.count for wish in wishes]
        starts = np.cumsum([0, *counts[:-1]])
        chosen, probabilities = torch.zeros_like(candidates[:, 0]), torch.zeros_like(values)
        previous = np.array([wish.sequence.canvas.tokens[wish.anchor] for wish in wishes])
        before = torch.from_numpy(previous).to(logits.device)
        for place in range(max(counts)):
            alive = np.array([i for i, count in enumerate(counts) if count > place])
            rows, who = (torch.from_numpy(x).to(logits.device) for x in (starts[alive] + place, alive))
            scores = selector.scores(before[who], hidden[rows], values[rows], candidates[rows])
            if address is None:
                column = scores.argmax(-1)
            elif noise is not None:
                column = (scores / temperature + noise[rows]).argmax(-1)
            else:
                probabilities[rows] = distribution(scores, temperature)
                column = draw(
                    probabilities[rows], Purpose.DRAFT, Address(**{k: x[rows] for k, x in vars(address).items()})
                )
            tokens = candidates[rows].gather(-1, column[:, None])[:, 0]
            chosen[rows] = tokens
            before = before.index_copy(0, who, tokens)
        return chosen, Drawn(probabilities, candidates) if address is not None and verify == "reject" else None


def _kind(wish: Wish) -> tuple:
    s = wish.sequence.decoding.settings
    return (s.temperature, s.top_k, s.top_p, s.verify) if s.temperature > 0 else (0.0, None, None, "match")


def _context_rows(item: Scheduled, layout: Layout) -> np.ndarray:
    """The rows whose states become the draft's context: those whose keys the target wrote."""
    start = layout.first_rows[item.sequence.number]
    rows = start + np.arange(len(item.span.positions))
    return rows[layout.host_slots[rows] >= 0]
