"""Shapes drawn at random, on memory poisoned by NaN: whatever a kernel must not read would show in what it returns."""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlm.kernels import Spans

NAN = float("nan")


@dataclass(frozen=True)
class Attention:
    """The arguments of one paged attention."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    spans: Spans
    block_length: int | None
    scale: float | None

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Spans, int | None, float | None]:
        return self.q, self.k_pages, self.v_pages, self.spans, self.block_length, self.scale

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Attention":
        tensors = {key: getattr(self, key).to(device, dtype) for key in ("q", "k_pages", "v_pages")}
        spans = {key: x.to(device) for key, x in vars(self.spans).items() if isinstance(x, Tensor)}
        return replace(self, **tensors, spans=replace(self.spans, **spans))

    def limits(self) -> list[list[int]]:
        """How many keys each row of each span sees, by the definition."""
        lengths = [self.block_length or 0] * len(self.spans)
        if self.spans.block_lengths is not None:
            lengths = self.spans.block_lengths.tolist()
        starts, positions = self.spans.starts.tolist(), self.spans.positions.tolist()
        found = []
        for i, (visible, length) in enumerate(zip(self.spans.visible.tolist(), lengths, strict=True)):
            rows = positions[starts[i] : starts[i + 1]]
            found.append([sum(length == 0 or j // length <= x // length for j in range(visible)) for x in rows])
        return found


def attention(
    seed: int, *, head_dims=(8, 10, 16), page_sizes=(4, 8, 16), longest=90, most_queries=12, groups=(1, 2, 3, 4)
) -> Attention:
    """Ragged spans (empty, of one token, of holes), empty contexts, pages in no order; fp32, on the CPU."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    b, g, e, page_size = rng.randint(1, 4), rng.choice((1, 2, 3)), rng.choice(head_dims), rng.choice(page_sizes)
    h = g * rng.choice(groups)
    visible = [rng.choice((0, 1, rng.randint(1, longest), rng.randint(1, longest))) for _ in range(b)]
    counts = [rng.choice((0, 1, rng.randint(1, most_queries), most_queries)) for _ in range(b)]
    positions = [sorted(rng.sample(range(max(x, c) + 3), c)) for x, c in zip(visible, counts, strict=True)]
    needed = [-(-x // page_size) for x in visible]
    pages = list(range(sum(needed) + 3))
    rng.shuffle(pages)
    tables = [[pages.pop() for _ in range(count)] for count in needed]
    block_lengths = [rng.choice((0, 1, 4, 5)) for _ in range(b)] if rng.random() < 0.25 else None
    block_length = None if block_lengths else rng.choice((None, 1, 4, 7, 32))
    spans = Spans.of(positions, visible, tables, block_lengths=block_lengths)
    if rng.random() < 0.3:  # the maxima are bounds: a larger launch than needed
        spans = replace(spans, max_queries=spans.max_queries + 3, max_visible=spans.max_visible + 40)
    shape = (sum(needed) + 3, page_size, g, e)
    k_pages, v_pages = torch.full(shape, NAN), torch.full(shape, NAN)
    n = sum(counts)
    q = torch.randn(n, h, e + 3, generator=generator)[..., :e]  # rows do not lie side by side
    case = Attention(q, k_pages, v_pages, spans, block_length, rng.choice((None, 0.3)))
    for limits, table in zip(case.limits(), tables, strict=True):
        for j in range(max(limits, default=0)):  # written, since a row sees it
            k_pages[table[j // page_size], j % page_size] = torch.randn(g, e, generator=generator)
            v_pages[table[j // page_size], j % page_size] = torch.randn(g, e, generator=generator)
    return case


@dataclass(frozen=True)
class Writing:
    """The arguments of one rotation and write."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    k_pages: Tensor
    v_pages: Tensor
    slots: Tensor

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """With pools of their own, so that a case can be used twice."""
        return (self.q, self.k, self.v, self.cos, self.sin, self.k_pages.clone(), self.v_pages.clone(), self.slots)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Writing":
        moved = {key: x.to(device, dtype) for key, x in vars(self).items() if x is not None and x.is_floating_point()}
        return replace(self, **moved, slots=self.slots.to(device))


def writing(seed: int, head_dims: tuple[int, ...] = (8, 10, 24)) -> Writing:
    """Some rows not written, q, k and v cut from one product, pools full of NaN."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, g, e, page_size = rng.randint(1, 7), rng.choice((1, 2, 3)), rng.choice(head_dims), rng.choice((4, 16))
    h = g * rng.choice((1, 2, 4))
    qkv = torch.randn(n, h + 2 * g, e, generator=generator)
    r = rng.choice((e, e, e // 4 * 2, 0))
    turns = [torch.randn(n, r, generator=generator) for _ in range(2)] if r else [None, None]
    slots = torch.randperm(4 * page_size, generator=generator)[:n]
    slots[torch.rand(n, generator=generator) < 0.3] = -1
    pools = [torch.full((4, page_size, g, e), NAN) for _ in range(2)]
    return Writing(qkv[:, :h], qkv[:, h : h + g], qkv[:, h + g :], *turns, *pools, slots)


def logits(seed: int, n: int, v: int, mask_id: int | None) -> Tensor:
    """Rows of all kinds: far apart, with ties, mostly -inf, sure of one token; on a strided canvas."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, v + 5, generator=generator)[:, :v] * torch.logspace(-1, 1.2, n)[:, None]
    x[0] = x[0].round()  # ties
    few = torch.rand(v, generator=generator) < 0.1
    few[v // 3] = True
    x[1, ~few] = float("-inf")
    x[2, v // 2] = 60.0
    x[3, :] = float("-inf")
    x[3, v - 2] = 1.0
    if mask_id is not None:
        x[4, mask_id] = x[4].max() + 3  # the mask would win
    return x


def address(seed: int, n: int) -> dict[str, Tensor]:
    """An address for each of n rows, words of more than 31 bits among them."""
    generator = torch.Generator().manual_seed(seed)
    ends = {"seed": 2**40, "sample": 2**32, "step": 1000, "position": 2**20}
    return {key: torch.randint(0, end, (n,), generator=generator) for key, end in ends.items()}
