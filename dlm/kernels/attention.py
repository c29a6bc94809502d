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

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from dlm.kernels import dealing
from dlm.kernels.chips import Chip, stages_of, tile_of
from dlm.kernels.dealing import begin_of, chunks_of, end_after, span_of
from dlm.kernels.spans import Spans

AHEAD = 8  # chunks that the second kernel loads at a time
LOG2_E = 1.4426950408889634


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
    out = torch.empty((n, h, e), dtype=q.dtype, device=q.device)
    if n == 0 or spans.max_queries == 0:
        return out
    chip, group = Chip.of(q.device), h // g
    tile = tile_of(e, q.element_size(), chip)
    work = dealing.Work.of(spans, n, group, g, tile, chip, split)
    cuts = dealing.cuts_of(spans, tile)
    partial, sums = out, out  # stand-ins, never touched
    if work.parts:
        partial = torch.empty((work.room, g, tile.rows, e), dtype=torch.float32, device=q.device)
        sums = torch.empty((work.room, g, tile.rows, 2), dtype=torch.float32, device=q.device)
    shape = {"HEAD": e, "PADDED": triton.next_power_of_2(e), "GROUP": group, **cuts}
    blocks = 2 if spans.block_lengths is not None else int(block_length is not None)
    table = (
        dealing.ends_of(spans, work, group, g, cuts),
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
            **shape, BLOCKS=blocks, COMBINED=dealing.COMBINED, AHEAD=AHEAD, num_warps=4, enable_fp_fusion=False,
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
