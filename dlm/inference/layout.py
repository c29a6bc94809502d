"""The packed tensors of one forward: each row's position, the slot its keys go to, the keys it sees."""

from collections.abc import Sequence as Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm.inference.pages import PagePool
from dlm.inference.scheduler import Scheduled
from dlm.kernels.spans import Spans
from dlm.models.attention import Rope
from dlm.models.transformer import Transformer


def rope_rows(network: Transformer, pool: PagePool, positions: Int[Tensor, " n"], furthest: int) -> Rope | None:
    """cos and sin of these positions, (1, n, 1, r) each: rows of a table over all positions, made once a pool."""
    if network.rope is None:
        return None
    if pool.rope is None or pool.rope[0].shape[1] <= furthest:
        all_positions = torch.arange(max(furthest + 1, 512) * 3 // 2, device=pool.k.device)
        pool.rope = network.rope_of(all_positions[None], network.embed.weight.dtype)
    assert pool.rope is not None
    return pool.rope[0].index_select(1, positions), pool.rope[1].index_select(1, positions)


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
        self.pool, self.device = pool, pool.k.device
        self.first_rows: dict[int, int] = {}
        """Of each request, by its number: the first row of its first branch."""
        self.pieces: list[Piece] = []
        self.starts: list[list[int]] = []
        """First row of each branch of each scheduled request."""
        positions, slots = [], []
        row, size = 0, pool.page_size
        for item in scheduled:
            seq, span = item.sequence, item.span
            at = np.fromiter(span.positions, np.int64, len(span.positions))
            kept = at >= span.silent
            if span.unwritten:
                kept &= ~np.isin(at, list(span.unwritten))
            firsts = []
            for table in seq.pages.tables:
                pages = np.asarray(table, np.int64)
                positions.append(at)
                slots.append(np.where(kept, pages[at // size] * size + at % size, -1))
                seen = tuple(table[: pool.pages_for(span.visible)])
                block = seq.attention_block if attention_block == "own" else attention_block
                self.pieces.append(Piece(row, row + len(at), span.visible, seen, block))
                firsts.append(row)
                row += len(at)
            self.starts.append(firsts)
            self.first_rows[seq.number] = firsts[0]
        self.rows = row
        self.host_positions, self.host_slots = np.concatenate(positions), np.concatenate(slots)
        self.positions = self.upload(self.host_positions)
        self.rope = rope_rows(network, pool, self.positions, int(self.host_positions.max()))

    def upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

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
    def spans(self) -> Spans:
        """The pieces as the kernels read them."""
        return Spans.of(
            [self.host_positions[piece.start : piece.stop].tolist() for piece in self.pieces],
            [piece.visible for piece in self.pieces],
            [piece.table for piece in self.pieces],
            self.device,
            [piece.attention_block or 0 for piece in self.pieces],
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
