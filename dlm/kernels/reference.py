"""The twins: each kernel in plain PyTorch, which defines what it computes and is the path "torch"."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dlm.diffusion.rng import gumbel
from dlm.kernels.picked import Picked
from dlm.kernels.routing import Routing
from dlm.kernels.spans import Spans


def paged_attention(
    q: Float[Tensor, "n h e"],
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    spans: Spans,
    block_length: int | None,
    scale: float | None = None,
) -> Float[Tensor, "n h e"]:
    """Attention of every span's rows to its sequence's pages, one span at a time.

    So a row's result cannot depend on the other spans. Pages that lie in order are read as a view.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grouped = q.shape[1] != k_pages.shape[2]
    for read in spans.reads(block_length, k_pages.shape[1]):
        k, v = (pool[read.pages].flatten(0, 1)[: read.seen].transpose(0, 1)[None] for pool in (k_pages, v_pages))
        rows = q[read.rows].transpose(0, 1)[None]
        found = F.scaled_dot_product_attention(rows, k, v, attn_mask=read.mask, scale=scale, enable_gqa=grouped)
        out[read.rows] = found[0].transpose(0, 1)
    return out


def rope_write(
    q: Float[Tensor, "n h e"],
    k: Float[Tensor, "n g e"],
    v: Float[Tensor, "n g e"],
    cos: Float[Tensor, "n r"] | None,
    sin: Float[Tensor, "n r"] | None,
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    slots: Int[Tensor, " n"],
    q_weight: Float[Tensor, " e"] | None = None,
    k_weight: Float[Tensor, " e"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "n h e"]:
    """Norm q and k where there are weights for it, rotate them (half-split, the first r channels), write k and v to flat
    slots page * s + offset, return q.

    Slot -1 writes nothing. The pools must be contiguous.
    """
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps)[0], rms_norm(k, k_weight, eps)[0]
    if cos is not None and sin is not None:
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    for pool, values in ((k_pages, k), (v_pages, v)):
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, values.to(pool.dtype))
    return q


def _rotate(x: Float[Tensor, "n h e"], cos: Float[Tensor, "n r"], sin: Float[Tensor, "n r"]) -> Tensor:
    r = cos.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    half = torch.cat((-turned[..., r // 2 :], turned[..., : r // 2]), dim=-1)
    turned = (turned * cos[:, None] + half * sin[:, None]).to(x.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def rms_norm(
    x: Float[Tensor, "n d"], weight: Float[Tensor, " d"], eps: float, residual: Float[Tensor, "n d"] | None = None
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """(norm of x + residual, x + residual): the sum in x's dtype, the norm in fp32, cast back, then times weight."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(total.dtype), total


def gated(gate_up: Float[Tensor, "n two_f"]) -> Float[Tensor, "n f"]:
    """silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_product(x: Float[Tensor, "n d"], weight: Float[Tensor, "two_f d"]) -> Float[Tensor, "n f"]:
    """`gated` of x weight^T."""
    return gated(F.linear(x, weight))


def route(
    x: Float[Tensor, "n d"], weight: Float[Tensor, "e d"], bias: Float[Tensor, " e"] | None, routing: Routing
) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Expert ids and their weights; the bias and the groups take part in the choice only."""
    logits = F.linear(x.float(), weight.float())
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias.float()
    if routing.kept_groups < routing.groups:
        groups = choice.view(len(x), routing.groups, choice.shape[1] // routing.groups)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(routing.kept_groups, dim=-1).indices
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, True)
        choice = groups.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    chosen = choice.topk(routing.chosen, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * routing.factor


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
    """Each expert's rows go through its matrices in one piece. With a `dtype`, experts may lie elsewhere: they add nothing."""
    experts, order = (chosen.flatten() - first).sort(stable=True)
    if dtype is not None:  # a process's share
        here = (experts >= 0) & (experts < len(down))
        experts, order = experts[here], order[here]
    found = _products(x[order // chosen.shape[1]], experts, gate_up, down)
    if len(order) == chosen.numel():
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        found = found[back]
    else:
        found = found.new_zeros(chosen.numel(), x.shape[1]).index_copy(0, order, found)
    # (n, k, d): each row's own experts side by side, so that the sum has a fixed order
    out = (found.view(*chosen.shape, x.shape[1]).float() * weights[..., None]).sum(1).to(dtype or x.dtype)
    return out if shared is None else out + shared


def _products(x: Tensor, experts: Int[Tensor, " m"], gate_up: Tensor, down: Tensor) -> Tensor:
    """Each row through the matrices of its expert; `experts` ascend."""
    numbers = torch.arange(len(down), device=x.device)
    if x.is_cuda and x.dtype == torch.bfloat16:  # one launch, and the host never waits for the counts
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        inner = gated(F.grouped_mm(x, gate_up.transpose(1, 2), offs=ends))
        return F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    pieces = []
    for i, rows in enumerate(x.split(torch.bincount(experts, minlength=len(numbers)).tolist())):
        if len(rows):
            pieces.append(F.linear(gated(F.linear(rows, gate_up[i])), down[i]))
    return torch.cat(pieces) if pieces else x


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
    """A token for each row, never the mask: the argmax at temperature 0 (ties to the lower id), else an addressed draw.

    `keep_mask` leaves the mask token in the softmax's denominator and entropy. At temperature 0 p is the plain softmax.
    """
    logits = logits.float()
    without = logits
    if mask_id is not None:
        without = logits.index_fill(-1, torch.full((1,), mask_id, device=logits.device), float("-inf"))
    if not keep_mask:
        logits = without
    finite = ~(logits.isnan() | logits.isposinf()).any(-1) & without.isfinite().any(-1)
    first_token = without.argmax(-1, keepdim=True)  # unlike topk, the lowest id among equals
    second = without.scatter(-1, first_token, float("-inf")).argmax(-1, keepdim=True)
    other = without.gather(-1, second).isfinite() & (second != first_token)
    token = first_token
    if temperature > 0:
        assert seed is not None and sample is not None and step is not None and position is not None
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the highest at 0: no temperature is too small
        scores = (without - without.amax(-1, keepdim=True)) / temperature
        noise = gumbel(seed=seed, sample=sample, step=step, position=position, vocab_size=logits.shape[-1])
        token = (scores + noise).argmax(-1, keepdim=True)
    p = logits.softmax(-1)
    return Picked(
        token=token[:, 0],
        p=p.gather(-1, token)[:, 0],
        first=p.gather(-1, first_token)[:, 0],
        first_token=first_token[:, 0],
        second=torch.where(other, p.gather(-1, second), 0.0)[:, 0],
        entropy=torch.special.entr(p).sum(-1),
        finite=finite,
    )
