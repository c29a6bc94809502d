"""Weights laid out for decoding: the same values in fewer and faster matrix products. Knows nothing of requests."""

import torch
from torch import Tensor, nn

from dlm.models.attention import Attention
from dlm.models.transformer import MLP, Transformer


def pack(network: Transformer) -> None:
    """Put the weights of products with the same input side by side; on a CPU also input-major, as small batches like it.

    The parameters stay what they are, now as views of the packed ones, so training and saving go on as before. A
    layer whose parameters were replaced since (another dtype or device, an adapter) is left to its single products.
    Measured on a CPU at width 256: 1.3 times faster at 32 rows, 2 times at 8.
    """
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, Attention):
                module.packed = _side_by_side(module.q_proj, module.k_proj, module.v_proj)
                _input_major(module.o_proj)
            elif isinstance(module, MLP):
                module.packed = _side_by_side(module.gate_proj, module.up_proj)
                _input_major(module.down_proj)
        if network.lm_head is not None:
            _input_major(network.lm_head)


def _side_by_side(*linears: nn.Module) -> Tensor | None:
    """One weight of all; None where a layer has a bias, is not plain or lies elsewhere."""
    weights = [weight for linear in linears if linear.bias is None and (weight := _plain(linear)) is not None]
    if len(weights) < len(linears):
        return None
    first, total = weights[0], sum(len(w) for w in weights)
    if first.device.type == "cpu":
        packed = torch.empty(first.shape[1], total, dtype=first.dtype).t()
    else:
        packed = torch.empty(total, first.shape[1], dtype=first.dtype, device=first.device)
    start = 0
    for weight in weights:
        part = packed[start : start + len(weight)]
        part.copy_(weight)
        weight.data = part
        start += len(weight)
    return packed


def _input_major(linear: nn.Module) -> None:
    weight = _plain(linear)
    if weight is not None and weight.device.type == "cpu" and weight.stride(0) != 1:
        weight.data = weight.data.t().contiguous().t()


def _plain(linear: nn.Module) -> Tensor | None:
    """The weight of an ordinary linear layer, whole and on a device that computes."""
    if type(linear) is not nn.Linear or type(linear.weight.data) is not Tensor or linear.weight.device.type == "meta":
        return None
    return linear.weight
