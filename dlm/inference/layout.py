"""The packed tensors of one forward: each row's position, the slot its keys go to, the keys it sees."""

from collections.abc import Sequence as Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm.inference.pages import PagePool
from dlm.inference.scheduler import Scheduled
from dlm.inference.spans import Span
from dlm.kernels.spans import Spans
from dlm.models.attention import Rope
from dlm.models.transformer import Transformer


def rope_rows(network: Transformer, pool: PagePool, positions: Int[Tensor, " n"], furthest: int) -> Rope | None:
    """cos and sin of these positions, (1, n, 1, r) each: rows of a table over all positions, made once a pool."""
    lengthen_rope(network, pool, furthest)
    return (
        None
        if pool.rope is None
        else (pool.rope[0].index_select(1, positions), pool.rope[1].index_select(1, positions))
    )


def lengthen_rope(network: Transformer, pool: PagePool, furthest: int) -> None:
    """Have the pool's table of rotations reach so far."""
    if network.rope is not None and (pool.rope is None or pool.rope[0].shape[1] <= furthest):
        all_positions = torch.arange(max(furthest + 1, 512) * 3 // 2, device=pool.k.device)
        pool.rope = network.rope_of(all_positions[None], network.embed.weight.dtype)


@dataclass(frozen=True)
class Piece:
    """The rows of one branch of one request, and the keys they may see."""

    start: int
    stop: int
    visible: int
    table: tuple[int, ...]
    attention_block: int | None
    """Block length of its attention; None sees everything."""

    @property
    def contiguous(self) -> bool:
        return self.table == tuple(range(self.table[0], self.table[0] + len(self.table)))


class Layout:
    """All of a forward that does not depend on the tokens: steps that run the same spans share it."""

    def __init__(
        self,
        scheduled: Sized[Scheduled],
        pool: PagePool,
        network: Transformer,
        attention_block: int | Literal["own"] | None = "own",
    ) -> None:
        """`attention_block` stands for that of the requests, where this network has another attention than the engine's."""
        self.pool, self.network, self.device = pool, network, pool.k.device
        self._numbers = [item.sequence.number for item in scheduled]
        self._branches = [item.sequence.pages.branches for item in scheduled]
        self.whose = np.repeat(np.arange(len(scheduled)), self._branches)
        """Of each piece, the number of its request among those scheduled."""
        items = [scheduled[number] for number in self.whose.tolist()]
        spans = [item.span for item in items]
        self._lengths = np.array([len(span.positions) for span in spans])
        self._visible = np.array([span.visible for span in spans])
        blocks = [item.sequence.attention_block if attention_block == "own" else attention_block for item in items]
        self._blocks = np.array([block or 0 for block in blocks], np.int32)
        tables = [table for item in scheduled for table in item.sequence.pages.arrays()]
        self._pages, self._held = np.concatenate(tables), np.array([len(table) for table in tables])
        self._tables = np.cumsum(self._held) - self._held
        """Where in `_pages` the table of each piece begins."""
        ends = np.cumsum(self._lengths)
        self._firsts, self.rows = ends - self._lengths, int(ends[-1])
        self.owner = np.repeat(np.arange(len(spans)), self._lengths)
        """Of each row, the number of its piece."""
        self.host_positions, self.host_slots = self._rows(spans)
        self.furthest = int(self.host_positions.max())
        """The highest position."""

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._firsts)

    def _rows(self, spans: Sized[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Position and slot of each row."""
        begins = np.array([span.positions[0] for span in spans])
        at = np.arange(self.rows) + (begins - self._firsts)[self.owner]
        gaps = [n for n, span in enumerate(spans) if span.unwritten or not isinstance(span.positions, range)]
        for number in gaps:
            at[self.owner == number] = spans[number].positions
        size = self.pool.page_size
        page = at // size
        assert (page < self._held[self.owner]).all(), "a row has no page"
        slots = self._pages[self._tables[self.owner] + page] * size + at % size
        slots[at < np.array([span.silent for span in spans])[self.owner]] = -1
        for number in gaps:
            slots[(self.owner == number) & np.isin(at, list(spans[number].unwritten))] = -1
        return at, slots

    @cached_property
    def starts(self) -> list[list[int]]:
        """First row of each branch of each scheduled request."""
        if len(self) == len(self._branches):
            return [[first] for first in self._firsts.tolist()]
        firsts = iter(self._firsts.tolist())
        return [list(islice(firsts, branches)) for branches in self._branches]

    @cached_property
    def first_rows(self) -> dict[int, int]:
        """Of each request, by its number: the first row of its first branch."""
        return {number: starts[0] for number, starts in zip(self._numbers, self.starts, strict=True)}

    def upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    @cached_property
    def pieces(self) -> list[Piece]:
        """One for each branch of each request."""
        rows = zip(self._firsts.tolist(), self._lengths.tolist(), strict=True)
        seen = zip(self._visible.tolist(), self._tables.tolist(), self._blocks.tolist(), strict=True)
        pages = self._pages.tolist()
        return [
            Piece(first, first + length, visible, tuple(pages[at : at + self.pool.pages_for(visible)]), block or None)
            for (first, length), (visible, at, block) in zip(rows, seen, strict=True)
        ]

    @cached_property
    def positions(self) -> Int[Tensor, " n"]:
        """Of each row."""
        return self.upload(self.host_positions)

    @cached_property
    def rope(self) -> Rope | None:
        """cos and sin of the rows."""
        return rope_rows(self.network, self.pool, self.positions, self.furthest)

    @cached_property
    def rotation(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """cos and sin of the rows, (n, 1, r), for `rotate_into`: the first half of sin is negative."""
        if self.rope is None:
            return None, None
        cos, sin = (table[0] for table in self.rope)
        half = sin.shape[-1] // 2
        return cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)

    @cached_property
    def slots(self) -> Int[Tensor, " n"]:
        """Where each row's keys go in the flat pool; -1: nowhere."""
        return self.upload(self.host_slots)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """What `Inputs` are made of."""
        starts = np.append(self._firsts, self.rows).astype(np.int32)
        visible, held = self._visible.astype(np.int32), -(-self._visible // self.pool.page_size)
        columns = np.arange(held.max())
        seen = columns < held[:, None]
        tables = np.zeros(seen.shape, np.int32)
        tables[seen] = self._pages[(self._tables[:, None] + columns)[seen]]
        found = {"starts": starts, "visible": visible, "tables": tables, "block_lengths": self._blocks}
        return {"positions": self.host_positions, "slots": self.host_slots, **found}

    @cached_property
    def most(self) -> tuple[int, int]:
        """Rows, and visible keys, of the largest piece."""
        return int(self._lengths.max()), int(self._visible.max())

    @cached_property
    def spans(self) -> Spans:
        """The pieces as the kernels read them."""
        names = ("starts", "visible", "tables", "block_lengths")
        rows, keys = self.most
        return Spans(
            positions=self.upload(self.host_positions.astype(np.int32)),
            max_queries=rows,
            max_visible=keys,
            **{name: self.upload(self.arrays[name]) for name in names},
        )

    @cached_property
    def written(self) -> tuple[slice, slice] | tuple[Tensor, Tensor]:
        """Rows whose keys are written, and their slots: as slices if both are neighbours."""
        rows = np.flatnonzero(self.host_slots >= 0)
        slots = self.host_slots[rows]
        if len(rows) and (np.diff(rows) == 1).all() and (np.diff(slots) == 1).all():
            return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(slots[0]), int(slots[-1]) + 1)
        return self.upload(rows), self.upload(slots)

    @cached_property
    def masks(self) -> list[Bool[Tensor, "q k"] | None]:
        """Of each piece, which of its visible keys each row may see; None: all."""
        return [self._mask(piece) for piece in self.pieces]

    @cached_property
    def indices(self) -> list[Int[Tensor, " k"] | slice]:
        """Of each piece, the slots of its visible keys: a slice where its pages are neighbours."""
        return [self._index(piece) for piece in self.pieces]

    def _mask(self, piece: Piece) -> Tensor | None:
        if piece.attention_block is None:
            return None
        block = self.host_positions[piece.start : piece.stop] // piece.attention_block
        if block.min() >= (piece.visible - 1) // piece.attention_block:
            return None
        keys = np.arange(piece.visible) // piece.attention_block
        return self.upload(keys[None, :] <= block[:, None])

    def _index(self, piece: Piece) -> Tensor | slice:
        size = self.pool.page_size
        if piece.contiguous:
            return slice(piece.table[0] * size, piece.table[0] * size + piece.visible)
        slots = np.asarray(piece.table)[:, None] * size + np.arange(size)
        return self.upload(slots.reshape(-1)[: piece.visible])
