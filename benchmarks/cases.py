"""What kernels.py times: calls of the kernels at shapes of real models, and the least bytes and FLOPs each needs."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlm.kernels import reference
from dlm.kernels.dispatch import confidence, paged_attention, rms_norm, rope_write
from dlm.kernels.spans import Spans

TINY = {"batch": 3, "context": 128, "block": 32, "rows": 96, "width": 256, "vocabulary": 2048, "head_dim": 32}
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

    def work(self, size: int) -> tuple[int, int]:
        """Bytes and FLOPs."""
        seen = [min((x // b + 1) * b, self.context) if (b := self.block_length) else self.context for x in self.rows]
        values = 2 * max(seen) * self.kv_heads + 2 * self.block * self.heads
        return self.batch * values * self.head_dim * size, 4 * self.batch * sum(seen) * self.heads * self.head_dim

    @property
    def rows(self) -> range:
        return range(self.context - self.block, self.context)

    def call(self, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], Tensor]:
        tensors = self.tensors(device, dtype, seed)
        return lambda: paged_attention(*tensors)

    def tensors(self, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """The arguments of paged_attention."""
        each = -(-self.context // self.page_size)
        pages = list(range(self.batch * each))
        random.Random(seed).shuffle(pages)
        tables = [pages[i * each : (i + 1) * each] for i in range(self.batch)]
        spans = Spans.of([self.rows] * self.batch, [self.context] * self.batch, tables, device)
        pool = (len(pages), self.page_size, self.kv_heads, self.head_dim)
        k, v = (torch.randn(pool, device=device, dtype=dtype) for _ in range(2))
        q = torch.randn(self.batch * self.block, self.heads, self.head_dim, device=device, dtype=dtype)
        return q, k, v, spans, self.block_length

    def error(self, device: torch.device, dtype: torch.dtype) -> float:
        """Forward error against fp64 of the same call, of the largest value; at most two spans, on the CPU."""
        few = replace(self, batch=min(self.batch, 2), context=min(self.context, 4096))
        q, k, v, spans, block_length = few.tensors(device, dtype, seed=0)
        found = paged_attention(q, k, v, spans, block_length).double().cpu()
        there = {key: x.cpu() for key, x in vars(spans).items() if isinstance(x, Tensor)}
        host = Spans(**there, max_queries=spans.max_queries, max_visible=spans.max_visible)
        exact = reference.paged_attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), host, block_length)
        return float((found - exact).abs().max() / exact.abs().max())


@dataclass(frozen=True, kw_only=True)
class Write:
    """Rotate and write n rows."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int

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
        return lambda: rope_write(q, k, v, cos, sin, keys, values, slots)


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


Case = Attention | Write | Norm | Confidence
LLADA = {"heads": 32, "kv_heads": 32, "head_dim": 128}
SDAR = {"heads": 32, "kv_heads": 8, "head_dim": 128}
BATCH_64 = "attention, LLaDA-8B, batch 64, context 4,096, block 32"
CASES: dict[str, Case] = {
    BATCH_64: Attention(batch=64, context=4096, block=32, **LLADA),
    "attention, LLaDA-8B, batch 1, context 1,024, block 32": Attention(batch=1, context=1024, block=32, **LLADA),
    "attention, SDAR-4B, batch 128, context 1,024, block 4": Attention(batch=128, context=1024, block=4, **SDAR),
    "attention, SDAR-4B, batch 8, context 16,384, block 32": Attention(batch=8, context=16384, block=32, **SDAR),
    "attention, LLaDA-8B, whole sequence of 4,096": Attention(batch=1, context=4096, block=4096, **LLADA),
    "attention, SDAR-4B, prefill of 4,096, block-causal 32": Attention(
        batch=1, context=4096, block=4096, block_length=32, **SDAR
    ),
    "rope and write, LLaDA-8B, 2,048 rows": Write(rows=2048, **LLADA),
    "rope and write, SDAR-4B, 512 rows": Write(rows=512, **SDAR),
    "norm, 2,048 rows of 4,096": Norm(rows=2048, width=4096),
    "confidence, 2,048 rows of LLaDA's vocabulary": Confidence(rows=2048, vocabulary=126464),
    "confidence, 32 rows of LLaDA's vocabulary": Confidence(rows=32, vocabulary=126464),
    "confidence, 2,048 rows, temperature 1": Confidence(rows=2048, vocabulary=126464, temperature=1.0),
}
GOALS = {BATCH_64: 0.8}
"""The share of its roofline that a case has to reach."""


def tiny(case: Case) -> Case:
    """The same work at a shape that torch can do on a CPU."""
    shape = {name: min(value, TINY[name]) for name, value in vars(case).items() if name in TINY}
    if not isinstance(case, Norm | Confidence):
        shape |= {"heads": 2 * case.heads // case.kv_heads, "kv_heads": 2}
    return replace(case, **shape)
