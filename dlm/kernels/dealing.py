"""How spans are dealt out to programs: which are whole, which are cut into chunks, and where chunks begin."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (inside a kernel, Python is Triton's)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlm.kernels.chips import Chip, Tile
from dlm.kernels.spans import Spans

CHUNK = 256  # keys
FINE = 16  # chunks of that size; from there on FINE / 2 of them each time the context doubles, so there are never many
OCTAVES = 12  # doublings: 16 million keys
COMBINED = 4  # rows that a program adds up


def chunks_in(keys: int) -> int:
    """How many chunks so many keys are; at least one."""
    first = CHUNK * FINE
    found = -(-min(keys, first) // CHUNK)
    for octave in range(OCTAVES):
        found += -(-min(max(keys - (first << octave), 0), first << octave) // (2 * CHUNK << octave))
    return max(1, found)


@dataclass(frozen=True)
class Work:
    """How a launch is dealt out. No number here changes a result."""

    tiles: int
    """Programs a head for spans that are whole."""
    parts: int
    """Programs a head for chunks of spans that are cut; 0: no span can be."""
    room: int
    """Chunks of tiles, a head, that can be kept."""
    rows: int
    """Programs a head that add chunks up."""
    bar: int
    """A span is cut where its keys, so many times, are more than those of all tiles together."""

    @classmethod
    def of(cls, spans: Spans, rows: int, group: int, heads: int, tile: Tile, chip: Chip, split: bool | None) -> "Work":
        tiles = min(rows * group // tile.rows + len(spans), len(spans) * -(-spans.max_queries * group // tile.rows))
        chunks = chunks_in(spans.max_visible)
        most = tiles if split else min(tiles, (chip.multiprocessors - 1) // heads)  # tiles of spans over the bar
        if split is False or chunks == 1 or most == 0:
            return cls(tiles, 0, 0, 0, 0)
        parts = min(-(-2 * chip.multiprocessors // heads), most * chunks)
        return cls(
            tiles, parts, most * chunks, most * -(-tile.rows // COMBINED), 1 << 30 if split else chip.multiprocessors
        )


def cuts_of(spans: Spans, tile: Tile) -> dict[str, int]:
    """What all kernels have to know to find their work."""
    assert spans.max_visible <= (CHUNK * FINE) << OCTAVES, spans.max_visible
    padded = triton.next_power_of_2(len(spans))
    return {"CHUNK": CHUNK, "FINE": FINE, "OCTAVES": OCTAVES, "ROWS": tile.rows, "SPANS": padded}


def ends_of(spans: Spans, work: Work, group: int, heads: int, cuts: dict[str, int]) -> Tensor:
    """Of each span, where its programs end among those of all: whole tiles, chunks, rows to add up. Once a forward."""
    key = work, group, heads, cuts["ROWS"]
    if key not in spans.dealt:
        spans.dealt[key] = torch.empty((3, len(spans)), dtype=torch.int32, device=spans.visible.device)
        deal[(1,)](
            spans.starts, spans.visible, spans.dealt[key], len(spans), heads, work.bar, work.room,
            GROUP=group, COMBINED=COMBINED, **cuts, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return spans.dealt[key]


@triton.jit
def chunks_of(keys, CHUNK: tl.constexpr, FINE: tl.constexpr, OCTAVES: tl.constexpr):
    """How many chunks so many keys are."""
    found = tl.cdiv(tl.minimum(keys, CHUNK * FINE), CHUNK)
    for octave in tl.static_range(OCTAVES):
        later = tl.minimum(tl.maximum(keys - CHUNK * FINE * 2**octave, 0), CHUNK * FINE * 2**octave)
        found += tl.cdiv(later, 2 * CHUNK * 2**octave)
    return found


@triton.jit
def begin_of(chunk, CHUNK: tl.constexpr, FINE: tl.constexpr):
    """The first key of a chunk."""
    later = tl.maximum(chunk - FINE, 0)
    octave, place = later // (FINE // 2), later % (FINE // 2)
    return tl.where(chunk < FINE, chunk * CHUNK, (later * 0 + CHUNK) * (FINE + 2 * place) << octave)


@triton.jit
def end_after(start, CHUNK: tl.constexpr, FINE: tl.constexpr, OCTAVES: tl.constexpr):
    """Where the chunk ends that begins at a key."""
    size = start * 0 + CHUNK
    for octave in tl.static_range(OCTAVES):
        size = tl.where(start >= CHUNK * FINE * 2**octave, 2 * CHUNK * 2**octave, size)
    return start + size


@triton.jit(do_not_specialize=["b", "heads", "bar", "room"])
def deal(
    starts, visible, ends, b, heads, bar, room, GROUP: tl.constexpr, ROWS: tl.constexpr, COMBINED: tl.constexpr,
    CHUNK: tl.constexpr, FINE: tl.constexpr, OCTAVES: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    span = tl.arange(0, SPANS)
    there = span < b
    rows = tl.load(starts + span + 1, mask=there, other=0) - tl.load(starts + span, mask=there, other=0)
    rows, keys = rows * GROUP, tl.load(visible + span, mask=there, other=0)
    tiles, chunks = tl.cdiv(rows, ROWS), chunks_of(keys, CHUNK, FINE, OCTAVES)
    total = tl.sum(tiles.to(tl.int64) * keys) * heads
    cut = (chunks > 1) & (keys.to(tl.int64) * bar > total)
    cut = cut & (tl.cumsum(tl.where(cut, tiles * chunks, 0)) <= room)
    tl.store(ends + span, tl.cumsum(tl.where(cut, 0, tiles)), mask=there)
    tl.store(ends + b + span, tl.cumsum(tl.where(cut, tiles * chunks, 0)), mask=there)
    tl.store(ends + 2 * b + span, tl.cumsum(tl.where(cut, tl.cdiv(rows, COMBINED), 0)), mask=there)


@triton.jit
def span_of(ends, item, b, SPANS: tl.constexpr):
    """The span that an item belongs to, and its number among that span's."""
    at = tl.arange(0, SPANS)
    bounds = tl.load(ends + at, mask=at < b, other=2147483647)
    return tl.sum((bounds <= item).to(tl.int32)), item - tl.max(tl.where(bounds <= item, bounds, 0))
