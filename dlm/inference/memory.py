"""What an engine needs memory for, and how many pages its pool has: as given, or what free memory holds."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlm.errors import UserError
from dlm.inference.config import EngineConfig
from dlm.inference.plan import BLOCK_LENGTH
from dlm.models.device import allocating, free_memory, whole_memory
from dlm.models.lm import LM

SHARE_ON_HOST = 0.25
"""Of `memory_fraction`: a CPU's memory is everybody's."""
RECORDED = 2048
"""Rows of the largest step that is recorded."""


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine holds, in bytes; weights and pages are counted, what a step needs meanwhile is an upper bound."""

    device: str
    weights: int
    """Of the model and its draft, with the copies that C reads."""
    graphs: int
    """What recorded steps keep for their intermediate results."""
    pages: int
    activations: int
    """The intermediate results of one step of `max_num_tokens` positions."""
    whole: int
    """The device's memory."""
    page_count: int
    page_size: int

    def __str__(self) -> str:
        parts = (f"{name} {getattr(self, name) / 2**30:.2f}" for name in ("weights", "graphs", "pages", "activations"))
        pages = f"{self.page_count:,} pages of {self.page_size} positions"
        return f"memory on {self.device}: {', '.join(parts)} GiB of {self.whole / 2**30:.1f} ({pages})"


def planned(lm: LM, config: EngineConfig, draft: Any, drafted: int, fused: bool, records: bool) -> MemoryPlan:
    """What an engine will hold. `drafted` are bytes of a draft for each page; `fused` as in `activation_bytes`; `records`:
    steps are recorded. Raises UserError where not one page fits beside the rest."""
    rest = getattr(draft, "rest", draft)
    activations = activation_bytes(lm, config, config.max_num_tokens, fused)
    graphs = activation_bytes(lm, config, min(RECORDED, config.max_num_tokens), fused) if records else 0
    pages = page_count(lm, config, drafted, activations + graphs)
    return MemoryPlan(
        device=str(lm.device),
        weights=weight_bytes(lm.network, rest, getattr(rest, "network", None)),
        graphs=graphs,
        pages=pages * (page_bytes(lm, config.page_size) + drafted),
        activations=activations,
        whole=whole_memory(lm.device),
        page_count=pages,
        page_size=config.page_size,
    )


def activation_bytes(lm: LM, config: EngineConfig, rows: int, fused: bool) -> int:
    """The most that a step of so many rows has at a time beside weights and pages. `fused`: norms and decisions are
    kernels, which keep nothing in fp32."""
    c, size = lm.config, lm.dtype.itemsize
    heads, width = lm.network.kv_heads, c.head_dim
    q, kv = c.num_attention_heads * heads // c.num_key_value_heads * width, heads * width
    feed = c.intermediate_size
    if c.moe is not None:
        feed = max(feed, (c.moe.num_experts_per_tok + c.moe.num_shared_experts) * c.moe.intermediate_size)
    wide = 0 if fused else 8 * c.hidden_size  # a norm's fp32
    layer = size * (3 * c.hidden_size + max(2 * (q + 2 * kv) + q, 3 * feed)) + wide
    block = 1 if c.attention == "causal" else c.block_length or BLOCK_LENGTH
    decided = min(rows, config.max_num_requests * block)
    return rows * layer + decided * (c.vocab_size * (size if fused else size + 12) + size * c.hidden_size)


def weight_bytes(*networks: Any) -> int:
    """Bytes of the networks' tensors, each counted once; other values count nothing."""
    found = {id(x): x for net in networks if isinstance(net, nn.Module) for x in (*net.parameters(), *net.buffers())}
    return tensor_bytes(found.values())


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these; of one that is made of others, such as a quantised one, theirs."""
    total = 0
    for x in tensors:
        parts = getattr(x, "__tensor_flatten__", None)
        total += (
            x.numel() * x.element_size() if parts is None else tensor_bytes(getattr(x, name) for name in parts()[0])
        )
    return total


@contextmanager
def fitting(plan: MemoryPlan, config: EngineConfig) -> Iterator[None]:
    """Raises UserError, which says what to lower, where there is no memory left for what is done inside."""
    pages = f"num_pages ({config.num_pages})" if config.num_pages else f"memory_fraction ({config.memory_fraction})"
    lower = (
        f"{plan}: it has not so much left. Lower {pages}, max_num_tokens ({config.max_num_tokens}) or "
        f"max_num_requests ({config.max_num_requests}), or the weights' size (quantize)"
    )
    with allocating(lambda: lower):
        yield


def page_count(lm: LM, config: EngineConfig, beside: int = 0, needed: int = 0) -> int:
    """`num_pages`, or as many as `memory_fraction` of the free memory holds and `max_num_requests` could ever use.

    `beside` are bytes that a page takes elsewhere: a draft's. On a GPU `needed` bytes stay free in any case.
    """
    each = page_bytes(lm, config.page_size) + beside
    if config.num_pages is not None:
        if config.num_pages * each > (most := whole_memory(lm.device)):
            raise UserError(
                f"{config.num_pages} pages of {config.page_size} positions take {config.num_pages * each / 2**30:,.1f} GiB, "
                f"and {lm.device} has {most / 2**30:,.1f} GiB in all: shorten the requests, or have fewer at a time "
                "(batch_size, num_pages)"
            )
        return config.num_pages
    free = free_memory(lm.device) * config.memory_fraction
    if lm.device.type == "cpu":
        free *= SHARE_ON_HOST
    else:
        free = max(0.0, min(free, free / config.memory_fraction - needed))
    if lm.network.group is not None:  # every process must schedule alike
        least = torch.tensor(free, dtype=torch.float64, device=lm.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, lm.network.group)
        free = least.item()
    useful = config.max_num_requests * 2 * -(-lm.config.context_length // config.page_size)
    pages = min(int(free // each), useful)
    if pages < 1:
        raise UserError(
            f"memory_fraction = {config.memory_fraction} of the free memory is {free / 2**20:.1f} MiB, and one page of "
            f"{config.page_size} positions takes {each / 2**20:.1f} MiB, beside {needed / 2**20:.1f} MiB that steps need: "
            "raise it, or make page_size, max_num_tokens or max_num_requests smaller"
        )
    return pages


def page_bytes(lm: LM, page_size: int) -> int:
    """Bytes of one page: keys and values of every layer."""
    c = lm.config
    return 2 * c.num_hidden_layers * page_size * lm.network.kv_heads * c.head_dim * lm.dtype.itemsize
