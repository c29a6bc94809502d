"""Mixtures of experts in Triton, without a word to the host: choose, sort by expert, multiply, sum up."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (inside a kernel, Python is Triton's)

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from dlm.kernels.grouped import SIDE, Arranged, product
from dlm.kernels.routing import Routing

PAIRS = 1024  # pairs of a row and an expert that a program reads at a time
VALUES = 1024


def route(
    x: Float[Tensor, "n d"], weight: Float[Tensor, "e d"], bias: Float[Tensor, " e"] | None, routing: Routing
) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
    """See `dlm.kernels.dispatch`. Two launches; of equal scores the lower expert."""
    n, e = x.shape[0], weight.shape[0]
    chosen = torch.empty((n, routing.chosen), dtype=torch.int32, device=x.device)
    weights = torch.empty((n, routing.chosen), dtype=torch.float32, device=x.device)
    if n > 0:
        scores = product(x, weight, dtype=torch.float32)
        choose[(n,)](
            scores, scores if bias is None else bias, chosen, weights, routing.factor,
            EXPERTS=e, GROUPS=routing.groups, SIZE=e // routing.groups, PADDED=triton.next_power_of_2(e // routing.groups),
            ROUND=triton.next_power_of_2(routing.groups), KEPT=routing.kept_groups, CHOSEN=routing.chosen,
            TOP=triton.next_power_of_2(routing.chosen), SIGMOID=routing.sigmoid, NORMALISE=routing.normalised,
            BIAS=bias is not None, num_warps=1 if e <= 128 else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return chosen, weights


def mixture(
    x: Float[Tensor, "n d"],
    chosen: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    gate_up: Float[Tensor, "e two_f d"],
    down: Float[Tensor, "e d f"],
    shared: Float[Tensor, "n d"] | None = None,
    first: int = 0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "n d"]:
    """See `dlm.kernels.dispatch`. Four launches."""
    (n, k), d = chosen.shape, down.shape[1]
    out = torch.empty((n, d), dtype=dtype or x.dtype, device=x.device)
    if n == 0:
        return out
    arranged = arrange(chosen, len(down), first, SIDE[x.element_size()])
    inner = product(x, gate_up, gated=True, arranged=arranged, each=k)
    outer = product(inner, down, arranged=arranged, back=True)
    add_up[(n, triton.cdiv(d, VALUES))](
        outer, chosen, weights, out if shared is None else shared, out, first, len(down), 0 if shared is None else shared.stride(0),
        WIDTH=d, CHOSEN=k, SHARED=shared is not None, VALUES=VALUES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def arrange(chosen: Int[Tensor, "n k"], experts: int, first: int, side: int) -> Arranged:
    """Pairs of rows and experts sorted by expert, those of an expert in order, in tiles of one expert each.

    Only of the experts from `first` on, so many: the others are another process's.
    """
    chosen = chosen.contiguous()
    pairs = chosen.numel()
    tiles, size = pairs // side + experts, {"dtype": torch.int32, "device": chosen.device}
    order, ends = torch.empty(pairs, **size), torch.empty(experts, **size)
    found = Arranged(order, ends, torch.empty(tiles, **size), torch.empty(tiles, **size))
    sort[(experts,)](
        chosen, order, ends, found.experts, found.firsts, pairs, first, SIDE=side, PAIRS=PAIRS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return found


@triton.jit
def choose(
    scores, bias, chosen, weights, factor,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROUND: tl.constexpr,
    KEPT: tl.constexpr, CHOSEN: tl.constexpr, TOP: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, ROUND)[:, None], tl.arange(0, PADDED)[None, :]
    expert, there = group * SIZE + member, (group < GROUPS) & (member < SIZE)
    score = tl.load(scores + row * EXPERTS + expert, mask=there, other=float("-inf"))
    score = tl.where(score == score, score, 0.0)  # a broken row chooses too, and stays broken
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    else:
        score = tl.exp(score - tl.max(tl.max(score, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
    choice = tl.where(there, choice, float("-inf"))
    if KEPT < GROUPS:  # those whose best two experts are worth most together
        best = tl.max(choice, 1)
        place = tl.min(tl.where(choice == best[:, None], member, PADDED), 1)
        worth = best + tl.max(tl.where(member == place[:, None], float("-inf"), choice), 1)
        number = tl.arange(0, ROUND)
        left = tl.where(number < GROUPS, worth, float("-inf"))
        kept = number < 0
        for _ in tl.static_range(KEPT):
            taken = number == tl.min(tl.where(left == tl.max(left, 0), number, ROUND), 0)
            kept, left = kept | taken, tl.where(taken, float("-inf"), left)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    slot = tl.arange(0, TOP)
    found, names = tl.zeros((TOP,), tl.float32), tl.zeros((TOP,), tl.int32)
    for turn in tl.static_range(CHOSEN):
        top = tl.max(tl.max(choice, 1), 0)
        name = tl.min(tl.min(tl.where(choice == top, expert, EXPERTS - 1), 1), 0)
        found = tl.where(slot == turn, tl.sum(tl.sum(tl.where(there & (expert == name), score, 0.0), 1), 0), found)
        names = tl.where(slot == turn, name, names)
        choice = tl.where(expert == name, float("-inf"), choice)
    if NORMALISE:
        found = found / (tl.sum(found, 0) + 1e-20)
    tl.store(chosen + row * CHOSEN + slot, names, mask=slot < CHOSEN)
    tl.store(weights + row * CHOSEN + slot, found * factor, mask=slot < CHOSEN)


@triton.jit(do_not_specialize=["pairs", "first"])
def sort(chosen, order, ends, experts, firsts, pairs, first, SIDE: tl.constexpr, PAIRS: tl.constexpr):
    """A program an expert. Its tiles are numbered from (pairs before it) / SIDE + its number: so no two experts share one,
    and nobody has to count the others' tiles."""
    expert, at = tl.program_id(0), tl.arange(0, PAIRS)
    before, own = tl.zeros((PAIRS,), tl.int32), tl.zeros((PAIRS,), tl.int32)
    for start in range(0, pairs, PAIRS):
        name = tl.load(chosen + start + at, mask=start + at < pairs, other=-1).to(tl.int32) - first
        before += ((name >= 0) & (name < expert)).to(tl.int32)
        own += (name == expert).to(tl.int32)
    begin, count = tl.sum(before, 0), tl.sum(own, 0)
    tl.store(ends + expert, begin + count)
    tile = begin // SIDE + expert
    more = (begin + count) // SIDE + 1 - begin // SIDE
    for some in range(0, more, PAIRS):
        number = some + at
        named = tl.where(number * SIDE < count, expert, -1)
        tl.store(experts + tile + number, named, mask=number < more)
        tl.store(firsts + tile + number, begin + number * SIDE, mask=number < more)
    if expert == tl.num_programs(0) - 1:  # the rest, where other processes have some pairs
        for some in range(tile + more, pairs // SIDE + tl.num_programs(0), PAIRS):
            tl.store(experts + some + at, at * 0 - 1, mask=some + at < pairs // SIDE + tl.num_programs(0))
    for start in range(0, pairs, PAIRS):
        name = tl.load(chosen + start + at, mask=start + at < pairs, other=-1).to(tl.int32) - first
        mine = ((name == expert) & (start + at < pairs)).to(tl.int32)
        tl.store(order + begin + tl.cumsum(mine, 0) - 1, start + at, mask=mine > 0)
        begin += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["first", "experts"])
def add_up(
    outer, chosen, weights, shared, out, first, experts, shared_row,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, SHARED: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    total = tl.zeros((VALUES,), tl.float32)
    for slot in tl.static_range(CHOSEN):
        pair = row * CHOSEN + slot
        name = tl.load(chosen + pair).to(tl.int32) - first
        here = tl.where((name >= 0) & (name < experts), WIDTH, 0)  # another process has it
        found = tl.load(outer + pair * WIDTH + d, mask=d < here, other=0.0).to(tl.float32)
        total += found * tl.load(weights + pair)
    total = total.to(out.dtype.element_ty)
    if SHARED:
        also = tl.load(shared + row * shared_row + d, mask=d < WIDTH, other=0.0)
        total = (total.to(tl.float32) + also.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + d, total, mask=d < WIDTH)
