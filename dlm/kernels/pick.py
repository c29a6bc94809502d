"""Confidence in Triton: each row's token and its probability in one pass over the vocabulary.

The vocabulary is cut into chunks of CHUNK tokens, a program each, and a second, small kernel adds the chunks up. The
cut never depends on the number of rows, so neither do results.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (inside a kernel, Python is Triton's)

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from dlm.diffusion.rng import Purpose
from dlm.kernels.picked import Picked

CHUNK = 4096
FACTS = 7  # numbers a chunk leaves: top, mass, drift, first, second, drawn logit, its noise


def confidence(
    logits: Float[Tensor, "n v"],
    *,
    mask_id: int | None,
    keep_mask: bool = True,
    temperature: float = 0.0,
    seed: Int[Tensor, " n"] | None = None,
    sample: Int[Tensor, " n"] | None = None,
    step: Int[Tensor, " n"] | None = None,
    position: Int[Tensor, " n"] | None = None,
) -> Picked:
    """See `dlm.kernels.dispatch`."""
    n, v = logits.shape
    assert logits.stride(1) == 1, "a row's logits lie side by side"
    draw = temperature > 0
    address = (logits,) * 4  # stand-ins, never read
    if draw:
        assert seed is not None and sample is not None and step is not None and position is not None
        address = tuple(x.long().contiguous() for x in (seed, sample, step, position))
    chunks, device = -(-v // CHUNK), logits.device
    facts = torch.empty((n, FACTS, chunks), dtype=torch.float32, device=device)
    tokens = torch.empty((n, 2, chunks), dtype=torch.int32, device=device)  # first, drawn
    numbers = torch.empty((4, n), dtype=torch.float32, device=device)
    chosen = torch.empty((2, n), dtype=torch.int64, device=device)
    finite = torch.empty((n,), dtype=torch.bool, device=device)
    if n > 0:
        mask = -1 if mask_id is None else mask_id
        survey[(n, chunks)](
            logits, facts, tokens, *address, logits.stride(0), v, mask, temperature,
            KEEP=keep_mask and mask_id is not None, DRAW=draw, CHUNK=CHUNK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        decide[(n,)](
            facts, tokens, numbers, chosen, finite, n, chunks, temperature,
            DRAW=draw, PADDED=triton.next_power_of_2(chunks), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    p, first, second, entropy = numbers
    return Picked(
        token=chosen[0], p=p, first=first, first_token=chosen[1], second=second, entropy=entropy, finite=finite
    )


PURPOSE = tl.constexpr(int(Purpose.TOKEN))


@triton.jit
def small(word):
    """(word + 1/2) / 2^32 rounded once to fp32, as through fp64, and below 1."""
    even = tl.where(word < (1 << 25), word + (word & 1), word | 1)  # halves go to even; further up they only break ties
    half = tl.where(word < (1 << 23), word.to(tl.float32) + 0.5, even.to(tl.float32))
    return tl.minimum(half * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)


@triton.jit
def minus_log1m(s):
    """-log(1 - s) for s in (0, 1), to a few ulp on both ends: the hardware's log is rough near 1."""
    z = s / (2.0 - s)
    z2 = z * z
    series = 1.0 / 11.0 + z2 * (1.0 / 13.0 + z2 * (1.0 / 15.0))
    series = 1.0 / 5.0 + z2 * (1.0 / 7.0 + z2 * (1.0 / 9.0 + z2 * series))
    low = 2.0 * z * (1.0 + z2 * (1.0 / 3.0 + z2 * series))
    return tl.where(s < 0.5, low, -tl.log(tl.where(s < 0.5, 0.5, 1.0 - s)))


@triton.jit
def gumbel(seed, sample, step, position, group, WIDTH: tl.constexpr):
    """Noise of tokens 4 * group to 4 * group + 3, side by side: key (seed, sample), counter (purpose, step, position, group)."""
    zero = tl.zeros((WIDTH // 4,), tl.uint32)
    w0, w1, w2, w3 = tl.random.philox_impl(
        zero + PURPOSE, zero + step.to(tl.uint32), zero + position.to(tl.uint32), zero + group.to(tl.uint32),
        seed.to(tl.uint32), sample.to(tl.uint32),
    )  # fmt: skip
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return -tl.log(minus_log1m(small(word)))


@triton.jit
def below(x, top, temperature, DRAW: tl.constexpr):
    """How far x lies below the highest, after temperature; the highest at 0 first, so that none is too small."""
    y = x - tl.where(top == float("-inf"), 0.0, top)  # of a chunk where all is -inf
    return tl.div_rn(y, temperature) if DRAW else y


@triton.jit(do_not_specialize=["mask"])  # a v that 16 divides, as vocabularies are, makes loads 128 bits wide
def survey(
    logits, facts, tokens, seed, sample, step, position, stride, v, mask, temperature,
    KEEP: tl.constexpr, DRAW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + token, mask=token < v, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)  # a top of infinity marks the row as broken
    candidate = tl.where(token == mask, float("-inf"), x)
    first, index = tl.max(candidate, 0, return_indices=True)  # the lower id among equals
    second = tl.max(tl.where(token == chunk * CHUNK + index, float("-inf"), candidate))
    top = first
    if KEEP:
        there = mask // CHUNK == chunk
        kept = tl.load(logits + row * stride + mask, mask=there, other=float("-inf")).to(tl.float32)
        top = tl.maximum(first, tl.where(kept != kept, float("inf"), kept))
    else:
        x = candidate
    y = below(x, top, temperature, DRAW)
    w = tl.exp(y)
    mass, drift = tl.split(tl.sum(tl.join(w, tl.where(w > 0.0, w * y, 0.0)), 0))
    at = facts + row * 7 * chunks + chunk
    into = tokens + row * 2 * chunks + chunk
    tl.store(at, top)
    tl.store(at + chunks, mass)
    tl.store(at + 2 * chunks, drift)
    tl.store(at + 3 * chunks, first)
    tl.store(at + 4 * chunks, second)
    tl.store(into, chunk * CHUNK + index)
    if DRAW:
        group = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        address = (tl.load(seed + row), tl.load(sample + row), tl.load(step + row), tl.load(position + row))
        noise = gumbel(*address, group, CHUNK)
        score = below(candidate, first, temperature, DRAW) + noise
        _, index = tl.max(score, 0, return_indices=True)
        drawn = tl.minimum(chunk * CHUNK + index, v - 1)
        tl.store(at + 5 * chunks, tl.max(tl.where(token == drawn, candidate, float("-inf"))))
        tl.store(at + 6 * chunks, tl.max(tl.where(token == drawn, noise, float("-inf"))))
        tl.store(into + chunks, drawn)


@triton.jit(do_not_specialize=["n", "chunks"])
def decide(
    facts, tokens, numbers, chosen, finite, n, chunks, temperature, DRAW: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = chunk < chunks
    at = facts + row * 7 * chunks + chunk
    top = tl.load(at, mask=inside, other=float("-inf"))
    mass = tl.load(at + chunks, mask=inside, other=0.0)
    drift = tl.load(at + 2 * chunks, mask=inside, other=0.0)
    first = tl.load(at + 3 * chunks, mask=inside, other=float("-inf"))
    second = tl.load(at + 4 * chunks, mask=inside, other=float("-inf"))

    peak = tl.max(top)
    best, winner = tl.max(first, 0, return_indices=True)  # chunks are in order of ids
    runner = tl.max(tl.where(chunk == winner, second, first))
    best_token = tl.load(tokens + row * 2 * chunks + winner)
    lower = below(top, peak, temperature, DRAW)
    weight = tl.exp(lower)
    total = tl.sum(mass * weight)
    entropy = tl.log(total) - tl.sum(tl.where(weight > 0.0, (drift + mass * lower) * weight, 0.0)) / total
    token, logit = best_token, best
    if DRAW:
        drawn = tl.load(at + 5 * chunks, mask=inside, other=float("-inf"))
        noise = tl.load(at + 6 * chunks, mask=inside, other=0.0)
        _, winner = tl.max(below(drawn, best, temperature, DRAW) + noise, 0, return_indices=True)
        winner = tl.minimum(winner, chunks - 1)  # of a broken row, where all are NaN
        token = tl.load(tokens + row * 2 * chunks + chunks + winner)
        logit = tl.load(facts + row * 7 * chunks + 5 * chunks + winner)
    tl.store(numbers + row, tl.exp(below(logit, peak, temperature, DRAW)) / total)
    tl.store(numbers + n + row, tl.exp(below(best, peak, temperature, DRAW)) / total)
    tl.store(numbers + 2 * n + row, tl.exp(below(runner, peak, temperature, DRAW)) / total)
    tl.store(numbers + 3 * n + row, tl.maximum(entropy, 0.0))
    tl.store(chosen + row, token.to(tl.int64))
    tl.store(chosen + n + row, best_token.to(tl.int64))
    tl.store(finite + row, (peak < float("inf")) & (best > float("-inf")))
