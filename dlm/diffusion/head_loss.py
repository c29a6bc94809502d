"""The summed cross-entropy of tokens straight from the states that predict them; the logits of a batch never exist at once.

Each slice of rows is used up while it lies in the processor's cache: logits, loss, and the gradients of states and head,
all in the forward pass. On one core this halves the time of a training step's loss (`benchmarks/train.py`).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

SLICE = 2**20
"""Logits of one slice, 4 MiB in fp32: smaller ones spend more on the head's gradient, which every slice adds to."""

WIDE_SLICE = 2**22
"""The same for another `multiply`, which lays the head out anew for every slice."""

GPU_SLICE = 2**26
"""The same on a GPU, 256 MiB: small slices would leave it idle between launches."""


def head_loss(
    states: Float[Tensor, "n d"],
    head: Float[Tensor, "v d"],
    targets: Int[Tensor, " n"],
    weight: Float[Tensor, " n"],
    never: int | None = None,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
) -> Float[Tensor, ""]:
    """sum_i weight_i * -log softmax(head @ states_i)[targets_i], in fp32; the token `never` has no probability.

    Differentiable in `states` and `head`. Under autocast the products are computed in autocast's dtype; `multiply` is what
    computes them.
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    with torch.autocast(kind, enabled=False):
        return _HeadLoss.apply(states.to(dtype), head, targets, weight.float(), never, multiply)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, head, targets, weight, never, multiply):
        need_states, need_head = ctx.needs_input_grad[:2]
        matrix = head.detach().to(states.dtype)
        d_states = torch.empty_like(states) if need_states else None
        d_head = torch.zeros_like(head, dtype=torch.float32) if need_head else None
        loss = torch.zeros((), dtype=torch.float64, device=states.device)
        most = GPU_SLICE if states.is_cuda else SLICE if multiply is torch.mm else WIDE_SLICE
        rows = max(1, most // len(head))
        for start in range(0, len(states), rows):
            cut = slice(start, start + rows)
            x, wanted, w = states[cut].detach(), targets[cut].unsqueeze(1), weight[cut]
            logits = multiply(x, matrix.T).float()
            if never is not None:
                logits[:, never] = float("-inf")
            log_p = torch.log_softmax(logits, -1, out=logits) if not logits.is_cuda else logits.log_softmax(-1)
            loss -= (log_p.gather(1, wanted).squeeze(1) * w).sum(dtype=torch.float64)
            if not (need_states or need_head):
                continue
            slope = log_p.exp_().mul_(w.unsqueeze(1))
            slope.scatter_add_(1, wanted, -w.unsqueeze(1))
            slope = slope.to(states.dtype)
            if d_states is not None:
                d_states[cut] = multiply(slope, matrix)
            if d_head is not None and multiply is torch.mm and slope.dtype == torch.float32:
                d_head.addmm_(slope.T, x)
            elif d_head is not None:
                d_head += multiply(slope.T, x)
        ctx.save_for_backward(d_states, d_head)
        ctx.dtype = head.dtype
        return loss.float()

    @staticmethod
    def backward(ctx, *outputs):
        (scale,) = outputs
        d_states, d_head = ctx.saved_tensors
        one = scale.numel() == 1 and not scale.is_cuda and scale.item() == 1.0
        scaled = [None if d is None else (d if one else d * scale.to(d.dtype)) for d in (d_states, d_head)]
        return scaled[0], None if scaled[1] is None else scaled[1].to(ctx.dtype), None, None, None, None
