"""[kernels]: each inner loop of the engine alone, held to this machine's copy bandwidth. Knows no model."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlm.bench.config import BenchConfig, KernelsSection
from dlm.bench.finding import Finding, Say, Table

if TYPE_CHECKING:
    import torch

HEADINGS = {
    "kernel": "kernel",
    "shape": "shape",
    "microseconds": "µs",
    "gigabytes_per_second": "GB/s",
    "of_copy": "of copy, %",
    "gigaflops": "GFLOP/s",
}
Case = tuple[str, str, Callable[[], object], int, int]
"""Kernel, shape in words, the call, bytes it must move, FLOPs."""


def measure(config: BenchConfig, say: Say) -> Finding:
    """Time every kernel at every shape."""
    import torch

    from dlm.bench.stopwatch import copy_bandwidth, time_of
    from dlm.models.loading import pick_device

    s = config.kernels or KernelsSection()
    device = pick_device(config.model.device)
    dtype = getattr(torch, config.model.dtype) if config.model.dtype != "auto" else _usual(device)
    copy = copy_bandwidth(device, s.seconds)
    say(f"copy {copy / 1e9:.1f} GB/s on {device}")
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for kernel, shape, call, moved, flops in _cases(s, device, dtype):
            seconds = time_of(call, device, s.seconds)
            speed = moved / seconds
            row = {"microseconds": round(seconds * 1e6, 2), "gigabytes_per_second": round(speed / 1e9, 3)}
            row |= {"of_copy": round(100 * speed / copy, 1), "gigaflops": round(flops / seconds / 1e9, 2)}
            rows.append({"kernel": kernel, "shape": shape, **row})
            say(f"  {kernel:16s} {shape:44s} {row['microseconds']:,.0f} µs")
    name = str(dtype).removeprefix("torch.")
    text = f"{name} on {device}; copy bandwidth {copy / 1e9:.1f} GB/s, read and written. GB/s counts what must move at least."
    values = {"kernels": {"device": str(device), "dtype": name, "copy_gigabytes_per_second": copy / 1e9, "rows": rows}}
    return Finding(values=values, tables=[Table(title="Kernels", headings=HEADINGS, rows=rows, text=text)])


def _usual(device: "torch.device") -> "torch.dtype":
    import torch

    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _cases(s: KernelsSection, device: "torch.device", dtype: "torch.dtype") -> Iterator[Case]:
    for batch in s.batches:
        for context in s.contexts:
            yield _attention(s, batch, context, device, dtype)
        yield _rope_write(s, batch, device, dtype)
        yield _norm(s, batch, device, dtype)
        yield _confidence(s, batch, device, dtype)


def _attention(s: KernelsSection, batch: int, context: int, device: "torch.device", dtype: "torch.dtype") -> Case:
    import torch

    from dlm.kernels.dispatch import paged_attention
    from dlm.kernels.spans import Spans

    visible = context + s.query
    pages = -(-visible // s.page_size)
    k, v = (torch.randn(batch * pages, s.page_size, s.kv_heads, s.head_dim, device=device, dtype=dtype) for _ in "kv")
    q = torch.randn(batch * s.query, s.heads, s.head_dim, device=device, dtype=dtype)
    tables = [range(i * pages, (i + 1) * pages) for i in range(batch)]
    spans = Spans.of([range(context, visible)] * batch, [visible] * batch, tables, device)
    moved = (2 * batch * visible * s.kv_heads + 2 * batch * s.query * s.heads) * s.head_dim * dtype.itemsize
    flops = 4 * batch * s.query * visible * s.heads * s.head_dim
    words = f"{batch} × {s.query} queries, {visible} keys"
    return "paged_attention", words, lambda: paged_attention(q, k, v, spans, None), moved, flops


def _rope_write(s: KernelsSection, batch: int, device: "torch.device", dtype: "torch.dtype") -> Case:
    import torch

    from dlm.kernels.dispatch import rope_write

    n = batch * s.query
    q = torch.randn(n, s.heads, s.head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(n, s.kv_heads, s.head_dim, device=device, dtype=dtype) for _ in "kv")
    angle = torch.rand(n, s.head_dim, device=device)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    pool = (-(-n // s.page_size), s.page_size, s.kv_heads, s.head_dim)
    k_pages, v_pages = (torch.zeros(pool, device=device, dtype=dtype) for _ in "kv")
    slots = torch.arange(n, device=device)
    moved = (2 * n * s.heads + 4 * n * s.kv_heads + 2 * n) * s.head_dim * dtype.itemsize
    return "rope_write", f"{n} rows", lambda: rope_write(q, k, v, cos, sin, k_pages, v_pages, slots), moved, 0


def _norm(s: KernelsSection, batch: int, device: "torch.device", dtype: "torch.dtype") -> Case:
    import torch

    from dlm.kernels.dispatch import rms_norm

    n, width = batch * s.query, s.heads * s.head_dim
    x, residual = (torch.randn(n, width, device=device, dtype=dtype) for _ in "xr")
    weight = torch.ones(width, device=device, dtype=dtype)
    return "rms_norm", f"{n} × {width}", lambda: rms_norm(x, weight, 1e-6, residual), 4 * n * width * dtype.itemsize, 0


def _confidence(s: KernelsSection, batch: int, device: "torch.device", dtype: "torch.dtype") -> Case:
    import torch

    from dlm.kernels.dispatch import confidence

    n = batch * s.query
    logits = torch.randn(n, s.vocabulary, device=device, dtype=dtype)
    return "confidence", f"{n} × {s.vocabulary}", lambda: confidence(logits, mask_id=0), logits.nbytes, 0
