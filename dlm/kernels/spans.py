"""Which query rows see which cached keys: the table that one forward is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Read:
    """How the host reads the keys of one span."""

    rows: slice
    seen: int
    """Keys that any of its rows sees: those past it may never have been written."""
    pages: slice | Int[Tensor, " m"]
    """A slice where they lie in order."""
    mask: Bool[Tensor, "l seen"] | None
    """None where every row sees all of them."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """b spans of query rows, n rows in all, each span of one sequence whose keys lie on pages.

    Key j of its sequence is seen by a row at position x if j < visible and, under a block length B, j // B <= x // B.
    Positions of a span need not be contiguous (infilling queries holes). Every row belongs to a span; a span may be
    empty. All tensors lie on one device; the two maxima are host numbers, at least what their names say: they size
    the launch and never change a result.
    """

    starts: Int[Tensor, " b_plus_1"]
    """int32: rows of span i are starts[i]:starts[i+1]."""
    positions: Int[Tensor, " n"]
    """int32 or int64: absolute position of every query row, >= 0."""
    visible: Int[Tensor, " b"]
    """int32: keys 0..visible[i]-1 of span i may be seen."""
    tables: Int[Tensor, "b m"]
    """int32: page numbers of each span's sequence; entries past its visible keys are never read."""
    max_queries: int
    max_visible: int
    block_lengths: Int[Tensor, " b"] | None = None
    """int32: each span's own block length, 0 where it sees all, if requests differ; the call's is then not read."""

    def __len__(self) -> int:
        return self.visible.shape[0]

    @classmethod
    def of(
        cls,
        positions: Sequence[Sequence[int]],
        visible: Sequence[int],
        tables: Sequence[Sequence[int]],
        device: torch.device | str | None = None,
        block_lengths: Sequence[int] | None = None,
    ) -> "Spans":
        """Spans from one list a span."""
        counts = [len(rows) for rows in positions]
        width = max((len(pages) for pages in tables), default=0)
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        padded = [[*pages, *[0] * (width - len(pages))] for pages in tables]
        return cls(
            starts=starts.to(device),
            positions=torch.tensor([x for rows in positions for x in rows], dtype=torch.int32, device=device),
            visible=torch.tensor(visible, dtype=torch.int32, device=device),
            tables=torch.tensor(padded, dtype=torch.int32, device=device).view(len(padded), width),
            max_queries=max(counts, default=0),
            max_visible=max(visible, default=0),
            block_lengths=None
            if block_lengths is None
            else torch.tensor(block_lengths, dtype=torch.int32, device=device),
        )

    def reads(self, block_length: int | None, page_size: int) -> list[Read]:
        """The spans that have something to do, for code that loops over them; made once for all layers of a forward."""
        key = (block_length, page_size)
        if key not in self._reads:
            own = None if self.block_lengths is None else self.block_lengths.tolist()
            lengths = [block_length] * len(self) if own is None else [length or None for length in own]
            found = [self._read(*span, length, page_size) for span, length in zip(self._on_host, lengths, strict=True)]
            self._reads[key] = [read for read in found if read is not None]
        return self._reads[key]

    def packed(self, block_length: int | None) -> tuple[Tensor, ...]:
        """Starts, positions, visible, tables and block lengths, all int32 and dense; made once for all layers of a forward."""
        if block_length not in self._packed:
            lengths = self.block_lengths
            if lengths is None:
                lengths = torch.full_like(self.visible, block_length or 0)
            parts = self.starts, self.positions, self.visible, self.tables, lengths
            self._packed[block_length] = tuple(x.to(torch.int32).contiguous() for x in parts)
        return self._packed[block_length]

    @cached_property
    def dealt(self) -> dict[Any, Tensor]:
        """How a kernel deals the spans out to its programs; made once for all layers of a forward."""
        return {}

    @cached_property
    def _packed(self) -> dict[int | None, tuple[Tensor, ...]]:
        return {}

    @cached_property
    def _reads(self) -> dict[tuple[int | None, int], list[Read]]:
        return {}

    @cached_property
    def _on_host(self) -> list[tuple[slice, int, list[int]]]:
        rows = [slice(a, b) for a, b in pairwise(self.starts.tolist())]
        return list(zip(rows, self.visible.tolist(), self.tables.tolist(), strict=True))

    def _read(
        self, rows: slice, visible: int, table: list[int], block_length: int | None, page_size: int
    ) -> Read | None:
        if rows.start == rows.stop or visible == 0:
            return None
        positions, mask, seen = self.positions[rows], None, visible
        if block_length is not None:  # each row sees the first so many keys
            limits = ((positions // block_length + 1) * block_length).clamp_max(visible)
            seen = int(limits.max())
            if int(limits.min()) < seen:
                mask = torch.arange(seen, device=positions.device) < limits[:, None]
        used = table[: -(-seen // page_size)]
        in_order = all(b == a + 1 for a, b in pairwise(used))
        pages = slice(used[0], used[-1] + 1) if in_order else torch.tensor(used, device=positions.device)
        return Read(rows, seen, pages, mask)
