"""What kernels.py times: calls of the kernels at shapes of real models, and the least bytes and FLOPs each needs."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlm.kernels import reference
from dlm.kernels.dispatch import confidence, gated, gated_product, mixture, paged_attention, rms_norm, rope_write, route
from dlm.kernels.routing import Routing
from dlm.kernels.spans import Spans

TINY = {"batch": 3, "context": 128, "block": 32, "rows": 96, "width": 256, "vocabulary": 2048, "head_dim": 32}
TINY |= {"inner": 128, "experts": 8, "chosen": 2, "groups": 4, "longest": 512}
"""The most of each for shapes that torch can do on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """b spans of `block` queries, the last of so many keys each; pages of 32 in no order."""

    batch: int
    context: int
    block: int
    heads: int
    kv_heads: int
    head_dim: int
    block_length: int | None = None
    page_size: int = 32
    longest: int | None = None
    """Keys of the first span, where it has more than the others."""

    def work(self, size: int) -> tuple[int, int]:
        """Bytes and FLOPs."""
        seen = [min((x // b + 1) * b, self.context) if (b := self.block_length) else self.context for x in self.rows]
        more = 0 if self.longest is None else self.longest - self.context
        values = 2 * (self.batch * max(seen) + more) * self.kv_heads + 2 * self.batch * self.block * self.heads
        pairs = self.batch * sum(seen) + more * self.block
        return values * self.head_dim * size, 4 * pairs * self.heads * self.head_dim

    @property
    def rows(self) -> range:
        return range(self.context - self.block, self.context)

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], Tensor]:
        tensors = self.tensors(device, dtype, seed)
        return lambda: paged_attention(*tensors)

    def tensors(self, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """The arguments of paged_attention."""
        contexts = [self.longest or self.context, *[self.context] * (self.batch - 1)]
        each = [-(-context // self.page_size) for context in contexts]
        pages = list(range(sum(each)))
        random.Random(seed).shuffle(pages)
        tables = [pages[sum(each[:i]) : sum(each[: i + 1])] for i in range(self.batch)]
        positions = [range(context - self.block, context) for context in contexts]
        spans = Spans.of(positions, contexts, tables, device)
        pool = (len(pages), self.page_size, self.kv_heads, self.head_dim)
        k, v = (torch.randn(pool, device=device, dtype=dtype) for _ in range(2))
        q = torch.randn(self.batch * self.block, self.heads, self.head_dim, device=device, dtype=dtype)
        return q, k, v, spans, self.block_length

    def error(self, device: torch.device, dtype: torch.dtype) -> float:
        """Forward error against fp64 of the same call, of the largest value; at most two spans, on the CPU."""
        few = replace(self, batch=min(self.batch, 2), context=min(self.context, 4096), longest=None)
        q, k, v, spans, block_length = few.tensors(device, dtype, seed=0)
        found = paged_attention(q, k, v, spans, block_length).double().cpu()
        there = {key: x.cpu() for key, x in vars(spans).items() if isinstance(x, Tensor)}
        host = Spans(**there, max_queries=spans.max_queries, max_visible=spans.max_visible)
        exact = reference.paged_attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), host, block_length)
        return float((found - exact).abs().max() / exact.abs().max())


@dataclass(frozen=True, kw_only=True)
class Write:
    """Rotate and write n rows, their heads normed or not."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    normed: bool = False

    def work(self, size: int) -> tuple[int, int]:
        values = 2 * self.heads + 4 * self.kv_heads + 2  # q, k, v in and out; cos and sin
        return self.rows * self.head_dim * values * size, 6 * self.rows * (self.heads + self.kv_heads) * self.head_dim

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], Tensor]:
        n, e = self.rows, self.head_dim
        qkv = torch.randn(n, self.heads + 2 * self.kv_heads, e, device=device, dtype=dtype)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        cos, sin = (torch.rand(n, e, device=device, dtype=dtype) for _ in range(2))
        keys, values = (torch.zeros(-(-n // 32), 32, self.kv_heads, e, device=device, dtype=dtype) for _ in range(2))
        slots = torch.randperm(n, device=device)
        weight = torch.rand(e, device=device, dtype=dtype) if self.normed else None
        return lambda: rope_write(q, k, v, cos, sin, keys, values, slots, weight, weight, 1e-6)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm of n rows with the residual added."""

    rows: int
    width: int

    def work(self, size: int) -> tuple[int, int]:
        return (4 * self.rows + 1) * self.width * size, 5 * self.rows * self.width

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
        x, residual = (torch.randn(self.rows, self.width, device=device, dtype=dtype) for _ in range(2))
        weight = torch.ones(self.width, device=device, dtype=dtype)
        return lambda: rms_norm(x, weight, 1e-6, residual)


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """One pass over the vocabulary for n rows."""

    rows: int
    vocabulary: int
    temperature: float = 0.0

    def work(self, size: int) -> tuple[int, int]:
        return self.rows * self.vocabulary * size, 8 * self.rows * self.vocabulary

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], object]:
        logits = 4 * torch.randn(self.rows, self.vocabulary, device=device, dtype=dtype)
        row = torch.arange(self.rows, device=device)
        temperature = self.temperature
        return lambda: confidence(
            logits, mask_id=0, temperature=temperature, seed=row, sample=row, step=row, position=row
        )


@dataclass(frozen=True, kw_only=True)
class Gate:
    """silu · mul over a packed product; with a width, that product too, in the same launch."""

    rows: int
    inner: int
    width: int = 0

    def work(self, size: int) -> tuple[int, int]:
        if not self.width:
            return 3 * self.rows * self.inner * size, 5 * self.rows * self.inner
        values = 2 * self.inner * self.width + self.rows * (self.inner + self.width)
        return values * size, 4 * self.rows * self.inner * self.width

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], Tensor]:
        x = torch.randn(self.rows, self.width or 2 * self.inner, device=device, dtype=dtype)
        if not self.width:
            return lambda: gated(x)
        weight = torch.randn(2 * self.inner, self.width, device=device, dtype=dtype)
        return lambda: gated_product(x, weight)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A layer's mixture, from rows in to rows out: routing, sorting, products, sum; no shared experts."""

    rows: int
    width: int
    inner: int
    experts: int
    chosen: int
    groups: int = 1

    def work(self, size: int) -> tuple[int, int]:
        pairs = self.rows * self.chosen
        met = self.experts * (1 - (1 - self.chosen / self.experts) ** self.rows)  # experts, where rows choose evenly
        values = 3 * met * self.inner * self.width + (self.experts + 2 * self.rows) * self.width
        return int(values * size), 6 * pairs * self.inner * self.width

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], Tensor]:
        x = torch.randn(self.rows, self.width, device=device, dtype=dtype)
        router = torch.randn(self.experts, self.width, device=device, dtype=dtype) / self.width**0.5
        gate_up = torch.randn(self.experts, 2 * self.inner, self.width, device=device, dtype=dtype)
        down = torch.randn(self.experts, self.width, self.inner, device=device, dtype=dtype)
        bias, kept = torch.zeros(self.experts, device=device), max(1, self.groups // 2)
        routing = Routing(chosen=self.chosen, sigmoid=True, normalised=True, groups=self.groups, kept_groups=kept)
        return lambda: mixture(x, *route(x, router, bias, routing), gate_up, down)


Case = Attention | Write | Norm | Confidence | Gate | Mixture
LLADA: dict[str, Any] = {"heads": 32, "kv_heads": 32, "head_dim": 128}
SDAR: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
MINI = {"width": 2048, "inner": 512, "experts": 256, "chosen": 8, "groups": 8}
BATCH_64 = "attention, LLaDA-8B, batch 64, context 4,096, block 32"
CASES: dict[str, Case] = {
    BATCH_64: Attention(batch=64, context=4096, block=32, **LLADA),
    "attention, LLaDA-8B, batch 1, context 1,024, block 32": Attention(batch=1, context=1024, block=32, **LLADA),
    "attention, SDAR-4B, batch 128, context 1,024, block 4": Attention(batch=128, context=1024, block=4, **SDAR),
    "attention, SDAR-4B, batch 8, context 16,384, block 32": Attention(batch=8, context=16384, block=32, **SDAR),
    "attention, SDAR-4B, batch 64, context 512, one of 16,384": Attention(
        batch=64, context=512, block=32, longest=16384, **SDAR
    ),
    "attention, LLaDA-8B, whole sequence of 4,096": Attention(batch=1, context=4096, block=4096, **LLADA),
    "attention, SDAR-4B, prefill of 4,096, block-causal 32": Attention(
        batch=1, context=4096, block=4096, block_length=32, **SDAR
    ),
    "rope and write, LLaDA-8B, 2,048 rows": Write(rows=2048, **LLADA),
    "rope and write, SDAR-4B, 512 rows": Write(rows=512, **SDAR),
    "norm, rope and write, SDAR-4B, 512 rows": Write(rows=512, normed=True, **SDAR),
    "gate, 2,048 rows of 12,288": Gate(rows=2048, inner=12288),
    "gate and up, LLaDA-8B, 32 rows": Gate(rows=32, inner=12288, width=4096),
    "gate and up, LLaDA-8B, 64 rows": Gate(rows=64, inner=12288, width=4096),
    "mixture, LLaDA2-mini, 32 rows": Mixture(rows=32, **MINI),
    "mixture, LLaDA2-mini, 2,048 rows": Mixture(rows=2048, **MINI),
    "norm, 2,048 rows of 4,096": Norm(rows=2048, width=4096),
    "confidence, 2,048 rows of LLaDA's vocabulary": Confidence(rows=2048, vocabulary=126464),
    "confidence, 32 rows of LLaDA's vocabulary": Confidence(rows=32, vocabulary=126464),
    "confidence, 2,048 rows, temperature 1": Confidence(rows=2048, vocabulary=126464, temperature=1.0),
}
GOALS = {BATCH_64: 0.8}
"""The share of its roofline that a case has to reach."""


def tiny(case: Case) -> Case:
    """The same work at a shape that torch can do on a CPU."""
    shape = {name: min(value, TINY[name]) for name, value in vars(case).items() if name in TINY and value is not None}
    if isinstance(case, Attention | Write):
        shape |= {"heads": 2 * case.heads // case.kv_heads, "kv_heads": 2}
    return replace(case, **shape)
