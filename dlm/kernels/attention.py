"""Paged attention in Triton: all spans of a forward in one launch, keys found through page tables.

The keys of a sequence are taken in chunks of CHUNK, each from a fresh softmax, and the chunks are added up in order.
A launch that fills the GPU does that in registers; a small one gives each chunk a program of its own and adds up in a
second kernel, by the same operations on the same numbers: products are never fused with sums behind our back
(`enable_fp_fusion=False`), and tile sizes follow from the head and dtype alone. So neither batch nor split is seen in
a result.
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

CHUNK = 256
COMBINED = 4  # rows a program of the second kernel adds up
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


def paged_attention(
    q: Float[Tensor, "n h e"],
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    spans: Spans,
    block_length: int | None,
    scale: float | None = None,
    split: bool | None = None,
) -> Float[Tensor, "n h e"]:
    """See `dlm.kernels.dispatch`. `split` forces or forbids a program a chunk."""
    n, h, e = q.shape
    page_size, g = k_pages.shape[1:3]
    assert h % g == 0 and q.stride(2) == k_pages.stride(3) == v_pages.stride(3) == 1, (q.shape, k_pages.shape)
    assert k_pages.dtype == v_pages.dtype == q.dtype and spans.tables.stride(1) == 1
    out = torch.empty((n, h, e), dtype=q.dtype, device=q.device)
    if n == 0 or spans.max_queries == 0:
        return out
    chip = Chip.of(q.device)
    tile = tile_of(e, q.element_size(), chip)
    tiles, chunks = -(-spans.max_queries * (h // g) // tile.rows), max(1, -(-spans.max_visible // CHUNK))
    if split is None:
        split = chunks > 1 and tiles * g * len(spans) < chip.multiprocessors
    partial, sums = out, out  # stand-ins, never touched
    if split:
        partial = torch.empty((n, h, chunks, e), dtype=torch.float32, device=q.device)
        sums = torch.empty((n, h, chunks, 2), dtype=torch.float32, device=q.device)
    shape = {"HEAD": e, "PADDED": triton.next_power_of_2(e), "GROUP": h // g, "CHUNK": CHUNK}
    blocks = 2 if spans.block_lengths is not None else int(block_length is not None)
    table = (
        spans.starts,
        spans.positions,
        spans.visible,
        block_length or 0,
        spans.visible if blocks < 2 else spans.block_lengths,
    )
    attend[(tiles * chunks if split else tiles, g, len(spans))](
        q, k_pages, v_pages, out, partial, sums, *table, spans.tables, spans.tables.stride(0),
        (e**-0.5 if scale is None else scale) * LOG2_E, tiles, chunks,
        *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
        **shape, PAGE=page_size, BLOCKS=blocks, ROWS=tile.rows, KEYS=tile.keys, SPLIT=split,
        num_warps=tile.warps, num_stages=stages_of(tile, e, q.element_size(), chip), enable_fp_fusion=False,
    )  # fmt: skip
    if split:
        combine[(-(-spans.max_queries * (h // g) // COMBINED), g, len(spans))](
            out, partial, sums, *table, chunks,
            **shape, BLOCKS=blocks, ROWS=COMBINED, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


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


@triton.jit(do_not_specialize=["block_length", "table_row", "tiles", "chunks"])
def attend(
    q, k_pages, v_pages, out, partial, sums, starts, positions, visible, block_length, block_lengths, tables, table_row,
    log2_scale, tiles, chunks,
    q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
    HEAD: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tile, chunk = tl.program_id(0) % tiles, tl.program_id(0) // tiles  # tiles of the same keys run side by side
    head, span = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    query, h, live, limit = rows_of(
        starts, positions, visible, block_length, block_lengths, tile, span, head, GROUP, BLOCKS, ROWS
    )
    seen = tl.max(limit)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, seen) if SPLIT else seen
    if tl.max(live.to(tl.int32)) == 0 or (SPLIT and begin >= seen):
        return

    e = tl.arange(0, PADDED)
    rows = tl.load(q + (query * q_row + h * q_head)[:, None] + e, mask=live[:, None] & (e < HEAD), other=0.0)
    acc, total = tl.zeros((ROWS, PADDED), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    all_acc, all_total, all_top = acc, total, top
    for start in range(begin, end, KEYS):
        if not SPLIT and start % CHUNK == 0:
            all_acc, all_total, all_top = fold(all_acc, all_total, all_top, acc, total, top)
            acc, total = tl.zeros((ROWS, PADDED), tl.float32), tl.zeros((ROWS,), tl.float32)
            top = tl.full((ROWS,), float("-inf"), tl.float32)
        key = start + tl.arange(0, KEYS)
        inside = key < end  # beyond it lies what nobody wrote
        page = tl.load(tables + span.to(tl.int64) * table_row + key // PAGE, mask=inside, other=0).to(tl.int64)
        there = inside[:, None] & (e < HEAD)
        k = tl.load(k_pages + (page * k_page + key % PAGE * k_slot + head * k_head)[:, None] + e, mask=there, other=0.0)
        v = tl.load(v_pages + (page * v_page + key % PAGE * v_slot + head * v_head)[:, None] + e, mask=there, other=0.0)
        scores = tl.dot(rows, tl.trans(k), input_precision="ieee") * log2_scale
        scores = tl.where(key[None, :] < limit[:, None], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p, old = tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        top = new

    if SPLIT:
        at = (query * heads + h) * chunks + chunk
        tl.store(partial + (at * HEAD)[:, None] + e, acc, mask=live[:, None] & (e < HEAD))
        tl.store(sums + at * 2, total, mask=live)
        tl.store(sums + at * 2 + 1, top, mask=live)
    else:
        all_acc, all_total, all_top = fold(all_acc, all_total, all_top, acc, total, top)
        finish(out, all_acc, all_total, query, h, live, heads, HEAD, PADDED)


@triton.jit(do_not_specialize=["block_length", "chunks"])
def combine(
    out, partial, sums, starts, positions, visible, block_length, block_lengths, chunks,
    HEAD: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    query, h, live, limit = rows_of(
        starts, positions, visible, block_length, block_lengths, tile, span, head, GROUP, BLOCKS, ROWS
    )
    e = tl.arange(0, PADDED)
    acc, total = tl.zeros((ROWS, PADDED), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for chunk in range(tl.cdiv(tl.max(limit), CHUNK)):
        at = (query * heads + h) * chunks + chunk
        seen = chunk * CHUNK < limit  # chunks past it may have had no program
        acc_c = tl.load(partial + (at * HEAD)[:, None] + e, mask=seen[:, None] & (e < HEAD), other=0.0)
        total_c = tl.load(sums + at * 2, mask=seen, other=0.0)
        top_c = tl.load(sums + at * 2 + 1, mask=seen, other=float("-inf"))
        acc, total, top = fold(acc, total, top, acc_c, total_c, top_c)
    finish(out, acc, total, query, h, live, heads, HEAD, PADDED)
