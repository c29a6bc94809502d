"""The packed tensors of one forward: each row's position, the slot its keys go to, the keys it sees."""

from collections.abc import Sequence as Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm.inference.canvas import positions_of
from dlm.inference.pages import PagePool
from dlm.inference.scheduler import Scheduled
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


@dataclass(frozen=True)
class Part:
    """One branch of one request, wherever it comes to stand among the rows."""

    positions: np.ndarray
    slots: np.ndarray
    """-1 where nothing is written."""
    pages: np.ndarray
    """int32, those of its visible keys."""
    visible: int
    block: int | None


def parts_of(item: Scheduled, pool: PagePool, attention_block: int | Literal["own"] | None = "own") -> list[Part]:
    """A part for each branch; those of the step before where the request runs the same."""
    seq, span = item.sequence, item.span
    block = seq.attention_block if attention_block == "own" else attention_block
    key = pool, seq.pages.version, span, block
    if seq.pages.laid is not None and seq.pages.laid[0] == key:
        return seq.pages.laid[1]
    at, size = positions_of(span.positions), pool.page_size
    kept = at >= span.silent
    if span.unwritten:
        kept &= ~np.isin(at, list(span.unwritten))
    parts = []
    for table in seq.pages.tables:
        pages = np.asarray(table, np.int64)
        slots = np.where(kept, pages[at // size] * size + at % size, -1)
        seen = table[: pool.pages_for(span.visible)]
        parts.append(Part(at, slots, np.asarray(seen, np.int32), span.visible, block))
    seq.pages.laid = key, parts
    return parts


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
        self.first_rows: dict[int, int] = {}
        """Of each request, by its number: the first row of its first branch."""
        self.starts: list[list[int]] = []
        """First row of each branch of each scheduled request."""
        self.parts: list[Part] = []
        row = 0
        for item in scheduled:
            firsts = []
            for part in parts_of(item, pool, attention_block):
                firsts.append(row)
                row += len(part.positions)
                self.parts.append(part)
            self.starts.append(firsts)
            self.first_rows[item.sequence.number] = firsts[0]
        self.rows, parts = row, self.parts
        self.host_positions = np.concatenate([part.positions for part in parts])
        self.host_slots = np.concatenate([part.slots for part in parts])
        self.furthest = int(self.host_positions.max())
        """The highest position."""

    def upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    @cached_property
    def pieces(self) -> list[Piece]:
        """One for each branch of each request."""
        firsts = [start for starts in self.starts for start in starts]
        return [
            Piece(first, first + len(part.positions), part.visible, tuple(part.pages.tolist()), part.block)
            for first, part in zip(firsts, self.parts, strict=True)
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
        parts = self.parts
        starts, lengths = np.zeros(len(parts) + 1, np.int32), [part.block or 0 for part in parts]
        np.cumsum([len(part.positions) for part in parts], out=starts[1:])
        tables = np.zeros((len(parts), max(len(part.pages) for part in parts)), np.int32)
        for table, part in zip(tables, parts, strict=True):
            table[: len(part.pages)] = part.pages
        visible = np.array([part.visible for part in parts], np.int32)
        found = {"starts": starts, "visible": visible, "tables": tables}
        found["block_lengths"] = np.array(lengths, np.int32)
        return {"positions": self.host_positions, "slots": self.host_slots, **found}

    @cached_property
    def most(self) -> tuple[int, int]:
        """Rows, and visible keys, of the largest piece."""
        return max(len(part.positions) for part in self.parts), max(part.visible for part in self.parts)

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
