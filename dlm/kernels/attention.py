"""Paged attention in Triton: all spans of a forward in one launch, keys found through page tables.

The keys of a sequence are taken in chunks that begin at the same keys always, each from a fresh softmax, and the chunks
are added up in order. Most spans do that in registers. A span that alone would keep one multiprocessor busy for longer
than the whole launch keeps all of them is cut: its chunks are dealt out to programs that run beside the others, and a
second kernel adds them up, by the same operations on the same numbers: products are never fused with sums behind our
back (`enable_fp_fusion=False`), and tile sizes follow from the head and dtype alone. So neither batch nor cut is seen
in a result.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (inside a kernel, Python is Triton's)

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from dlm.errors import UserError
from dlm.kernels.spans import Spans

CHUNK = 256  # keys
FINE = 16  # chunks of that size; from there on FINE / 2 of them each time the context doubles, so there are never many
OCTAVES = 12  # doublings: 16 million keys
COMBINED = 4  # rows a program of the second kernel adds up
AHEAD = 8  # chunks it loads at a time
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Chip:
    """What a launch has to know of the GPU."""

    multiprocessors: int
    shared_memory: int
    """Bytes a program may have."""
    generation: int
    """CUDA compute capability's major number; 0 elsewhere."""

    @classmethod
    @cache
    def of(cls, device: torch.device) -> "Chip":
        if device.type != "cuda":  # Triton's interpreter
            return cls(1, 65536, 0)
        facts = torch.cuda.get_device_properties(device)
        shared = getattr(facts, "shared_memory_per_block_optin", 0) or facts.shared_memory_per_block
        return cls(facts.multi_processor_count, shared, 0 if torch.version.hip else facts.major)


@dataclass(frozen=True)
class Tile:
    """What a program holds at once: rows (queries × heads of a group) and keys."""

    rows: int
    keys: int
    warps: int


TILES = {  # (head size up to, bytes of an element): small enough for every chip's registers, wide enough for its tensor cores
    (64, 2): Tile(64, 64, 4),
    (128, 2): Tile(64, 64, 4),
    (256, 2): Tile(64, 32, 8),
    (64, 4): Tile(32, 32, 4),
    (128, 4): Tile(32, 16, 8),
    (256, 4): Tile(32, 16, 8),
}
BLACKWELL = {(128, 2): Tile(64, 64, 8)}  # accumulators live in tensor memory: more warps have room to scale them


def tile_of(head_dim: int, itemsize: int, chip: Chip) -> Tile:
    """The tile of a head size on a chip: never of the batch, or results would follow it."""
    tiles = {**TILES, **BLACKWELL} if chip.generation == 10 else TILES
    fitting = [tile for (size, width), tile in tiles.items() if head_dim <= size and width == itemsize]
    if not fitting:
        raise UserError(
            f"no attention kernel for heads of {head_dim} channels of {itemsize} bytes: they go up to 256 channels, in "
            "float16, bfloat16 or float32"
        )
    return fitting[0]


def stages_of(tile: Tile, head_dim: int, itemsize: int, chip: Chip) -> int:
    """Triton's `num_stages`: three key tiles in shared memory where two programs still fit beside each other, else two.

    The page table is a pipelined load of its own, before the keys', so b tiles take 2 b - 1 stages. Results do not change.
    """
    row = triton.next_power_of_2(head_dim) * itemsize
    return 5 if 2 * (tile.rows + 3 * 2 * tile.keys) * row < chip.shared_memory else 3


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


def paged_attention(
    q: Float[Tensor, "n h e"],
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    spans: Spans,
    block_length: int | None,
    scale: float | None = None,
    split: bool | None = None,
) -> Float[Tensor, "n h e"]:
    """See `dlm.kernels.dispatch`. `split` cuts all spans of several chunks, or none."""
    n, h, e = q.shape
    page_size, g = k_pages.shape[1:3]
    assert h % g == 0 and q.stride(2) == k_pages.stride(3) == v_pages.stride(3) == 1, (q.shape, k_pages.shape)
    assert k_pages.dtype == v_pages.dtype == q.dtype and spans.tables.stride(1) == 1
    assert spans.max_visible <= (CHUNK * FINE) << OCTAVES, spans.max_visible
    out = torch.empty((n, h, e), dtype=q.dtype, device=q.device)
    if n == 0 or spans.max_queries == 0:
        return out
    chip, group = Chip.of(q.device), h // g
    tile = tile_of(e, q.element_size(), chip)
    work = Work.of(spans, n, group, g, tile, chip, split)
    cuts = {
        "CHUNK": CHUNK,
        "FINE": FINE,
        "OCTAVES": OCTAVES,
        "ROWS": tile.rows,
        "SPANS": triton.next_power_of_2(len(spans)),
    }
    ends = _ends(spans, work, group, g, cuts)
    partial, sums = out, out  # stand-ins, never touched
    if work.parts:
        partial = torch.empty((work.room, g, tile.rows, e), dtype=torch.float32, device=q.device)
        sums = torch.empty((work.room, g, tile.rows, 2), dtype=torch.float32, device=q.device)
    shape = {"HEAD": e, "PADDED": triton.next_power_of_2(e), "GROUP": group, **cuts}
    blocks = 2 if spans.block_lengths is not None else int(block_length is not None)
    table = (
        ends,
        len(spans),
        spans.starts,
        spans.positions,
        spans.visible,
        block_length or 0,
        spans.visible if blocks < 2 else spans.block_lengths,
    )
    attend[(work.parts + work.tiles, g)](
        q, k_pages, v_pages, out, partial, sums, *table, spans.tables, spans.tables.stride(0),
        (e**-0.5 if scale is None else scale) * LOG2_E, work.parts,
        *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
        **shape, PAGE=page_size, BLOCKS=blocks, KEYS=tile.keys, CUT=work.parts > 0,
        num_warps=tile.warps, num_stages=stages_of(tile, e, q.element_size(), chip), enable_fp_fusion=False,
    )  # fmt: skip
    if work.parts:
        combine[(work.rows, g)](
            out, partial, sums, *table,
            **shape, BLOCKS=blocks, COMBINED=COMBINED, AHEAD=AHEAD, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _ends(spans: Spans, work: Work, group: int, heads: int, cuts: dict[str, int]) -> Tensor:
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


@triton.jit
def rows_of(
    starts, positions, visible, block_length, block_lengths, tile, span, head, GROUP: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Of a tile's rows: query row and head in the launch, whether there is such a row, and how many keys it sees."""
    first = tl.load(starts + span)
    row = tile * ROWS + tl.arange(0, ROWS)
    query = first + row // GROUP
    live = query < tl.load(starts + span + 1)
    limit = tl.zeros((ROWS,), tl.int32) + tl.load(visible + span)
    if BLOCKS > 0:
        length = tl.load(block_lengths + span) if BLOCKS == 2 else block_length
        position = tl.load(positions + query, mask=live, other=0).to(tl.int32)
        bound = (position // tl.maximum(length, 1) + 1) * length
        limit = tl.where(length == 0, limit, tl.minimum(limit, bound))
    return query.to(tl.int64), head * GROUP + row % GROUP, live, tl.where(live, limit, 0)


@triton.jit
def fold(acc, total, top, acc_c, total_c, top_c):
    """Add a chunk to what the chunks before it gave."""
    new = tl.maximum(top, top_c)
    safe = tl.where(new == float("-inf"), 0.0, new)
    old, fresh = tl.exp2(top - safe), tl.exp2(top_c - safe)
    return acc * old[:, None] + acc_c * fresh[:, None], total * old + total_c * fresh, new


@triton.jit
def finish(out, acc, total, query, h, live, heads, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """Divide by the softmax's sum; a row that saw nothing gives zeros."""
    e = tl.arange(0, PADDED)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = out + ((query * heads + h) * HEAD)[:, None] + e
    tl.store(at, acc.to(out.dtype.element_ty), mask=live[:, None] & (e < HEAD))


@triton.jit(do_not_specialize=["block_length", "table_row", "b", "parts"])
def attend(
    q, k_pages, v_pages, out, partial, sums, ends, b, starts, positions, visible, block_length, block_lengths,
    tables, table_row, log2_scale, parts,
    q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
    HEAD: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, FINE: tl.constexpr,
    OCTAVES: tl.constexpr, PAGE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPANS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    program, head, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    whole = program >= parts  # the others take a chunk of a tile after the other
    first = tl.where(whole, program - parts, program)
    last = tl.minimum(first + 1, tl.load(ends + b - 1))
    if CUT:
        last = tl.where(whole, last, tl.load(ends + 2 * b - 1))
    e = tl.arange(0, PADDED)
    for item in range(first, last, tl.where(whole, 1, parts)):
        span, index = span_of(ends + tl.where(whole, 0, b), item, b, SPANS)
        tiles = tl.cdiv((tl.load(starts + span + 1) - tl.load(starts + span)) * GROUP, ROWS)
        tile, chunk = (
            tl.where(whole, tiles - 1 - index, index % tiles),
            tl.where(whole, 0, index // tiles),
        )  # longest first
        query, h, live, limit = rows_of(
            starts, positions, visible, block_length, block_lengths, tile, span, head, GROUP, BLOCKS, ROWS
        )
        seen = tl.max(limit)
        begin = begin_of(chunk, CHUNK, FINE)
        end = tl.where(whole, seen, tl.minimum(begin_of(chunk + 1, CHUNK, FINE), seen))
        rows = tl.load(q + (query * q_row + h * q_head)[:, None] + e, mask=live[:, None] & (e < HEAD), other=0.0)
        acc, total = tl.zeros((ROWS, PADDED), tl.float32), tl.zeros((ROWS,), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        all_acc, all_total, all_top = acc, total, top
        edge = end_after(begin, CHUNK, FINE, OCTAVES)
        for start in range(begin, end, KEYS):
            if start == edge:
                all_acc, all_total, all_top = fold(all_acc, all_total, all_top, acc, total, top)
                acc, total = tl.zeros((ROWS, PADDED), tl.float32), tl.zeros((ROWS,), tl.float32)
                top = tl.full((ROWS,), float("-inf"), tl.float32)
                edge = end_after(start, CHUNK, FINE, OCTAVES)
            key = start + tl.arange(0, KEYS)
            inside = key < end  # beyond it lies what nobody wrote
            page = tl.load(tables + span.to(tl.int64) * table_row + key // PAGE, mask=inside, other=0).to(tl.int64)
            there, slot = inside[:, None] & (e < HEAD), key % PAGE
            k = tl.load(k_pages + (page * k_page + slot * k_slot + head * k_head)[:, None] + e, mask=there, other=0.0)
            v = tl.load(v_pages + (page * v_page + slot * v_slot + head * v_head)[:, None] + e, mask=there, other=0.0)
            scores = tl.dot(rows, tl.trans(k), input_precision="ieee") * log2_scale
            scores = tl.where(key[None, :] < limit[:, None], scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            p, old = tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)
            total = total * old + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
            top = new

        if whole:
            all_acc, all_total, all_top = fold(all_acc, all_total, all_top, acc, total, top)
            finish(out, all_acc, all_total, query, h, live, groups * GROUP, HEAD, PADDED)
        elif begin < seen:
            at = ((tl.zeros((ROWS,), tl.int64) + item) * groups + head) * ROWS + tl.arange(0, ROWS)
            tl.store(partial + (at * HEAD)[:, None] + e, acc, mask=live[:, None] & (e < HEAD))
            tl.store(sums + at * 2, total, mask=live)
            tl.store(sums + at * 2 + 1, top, mask=live)


@triton.jit(do_not_specialize=["block_length", "b"])
def combine(
    out, partial, sums, ends, b, starts, positions, visible, block_length, block_lengths,
    HEAD: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, FINE: tl.constexpr,
    OCTAVES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr, COMBINED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    program, head, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if program >= tl.load(ends + 3 * b - 1):
        return
    span, index = span_of(ends + 2 * b, program, b, SPANS)
    tiles = tl.cdiv((tl.load(starts + span + 1) - tl.load(starts + span)) * GROUP, ROWS)
    query, h, live, limit = rows_of(
        starts, positions, visible, block_length, block_lengths, index, span, head, GROUP, BLOCKS, COMBINED
    )
    row = index * COMBINED + tl.arange(0, COMBINED)
    before = tl.where(span > 0, tl.load(ends + b + tl.maximum(span - 1, 0)), 0)
    e = tl.arange(0, PADDED)
    acc, total = tl.zeros((COMBINED, PADDED), tl.float32), tl.zeros((COMBINED,), tl.float32)
    top = tl.full((COMBINED,), float("-inf"), tl.float32)
    for some in range(0, chunks_of(tl.max(limit), CHUNK, FINE, OCTAVES), AHEAD):
        for ahead in tl.static_range(AHEAD):  # unrolled: all are on their way before the first is added
            chunk = some + ahead
            item = (before + chunk * tiles + row // ROWS).to(tl.int64)
            at = (item * groups + head) * ROWS + row % ROWS
            seen = begin_of(chunk, CHUNK, FINE) < limit  # chunks past it may have had no program
            acc_c = tl.load(partial + (at * HEAD)[:, None] + e, mask=seen[:, None] & (e < HEAD), other=0.0)
            total_c = tl.load(sums + at * 2, mask=seen, other=0.0)
            top_c = tl.load(sums + at * 2 + 1, mask=seen, other=float("-inf"))
            acc, total, top = fold(acc, total, top, acc_c, total_c, top_c)
    finish(out, acc, total, query, h, live, groups * GROUP, HEAD, PADDED)
