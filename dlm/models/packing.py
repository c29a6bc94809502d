"""Weights laid out for decoding: the same values in fewer and faster matrix products."""

import torch
from torch import Tensor, nn

from dlm.models.attention import Attention
from dlm.models.transformer import MLP, Transformer

ALIGNMENT = 64


def pack(network: Transformer, input_major: bool = False) -> None:
    """Put the weights of products with the same input side by side; on a CPU, laid out by inputs if that is asked for.

    The parameters stay what they are, now as views of the packed ones, so training and saving go on as before. A
    layer whose parameters were replaced since (another dtype or device, an adapter) is left to its single products.
    What lies right is left where it is.
    """
    input_major = input_major and network.embed.weight.device.type == "cpu"
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, Attention):
                projections = module.q_proj, module.k_proj, module.v_proj
                module.packed = _side_by_side(module.packed, input_major, *projections)
                _lay_out(module.o_proj, input_major)
            elif isinstance(module, MLP):
                module.packed = _side_by_side(module.packed, input_major, module.gate_proj, module.up_proj)
                _lay_out(module.down_proj, input_major)
        if network.lm_head is not None:
            _lay_out(network.lm_head, input_major)


def align(network: nn.Module) -> None:
    """Move weights that begin at an odd address to one that is a multiple of 64 bytes, where torch allocates; in place.

    torch's products on a CPU round differently with the address of their operands, and a weight that is a piece of a
    mapped file begins anywhere. One tensor is copied at a time.
    """
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT:
                tensor.data = tensor.data.clone()


def _side_by_side(packed: Tensor | None, input_major: bool, *linears: nn.Module) -> Tensor | None:
    """One weight of all; None where a layer has a bias, is not plain or lies elsewhere."""
    weights = [weight for linear in linears if linear.bias is None and (weight := _plain(linear)) is not None]
    if len(weights) < len(linears):
        return None
    first, total = weights[0], sum(len(w) for w in weights)
    if packed is None or not _are_parts(weights, packed, input_major):
        packed = torch.empty(total, first.shape[1], dtype=first.dtype, device=first.device)
        if input_major:
            packed = packed.view(first.shape[1], total).t()
        for weight, part in zip(weights, packed.split([len(w) for w in weights]), strict=True):
            part.copy_(weight)
            weight.data = part
    return packed


def _are_parts(weights: list[Tensor], packed: Tensor, input_major: bool) -> bool:
    """Whether they are views of it, in order, and it is laid out as it should be."""
    if packed.dtype != weights[0].dtype or (packed.stride(0) == 1) != input_major:
        return False
    parts = packed.split([len(w) for w in weights])
    return all(w.data_ptr() == p.data_ptr() and w.stride() == p.stride() for w, p in zip(weights, parts, strict=True))


def _lay_out(linear: nn.Module, input_major: bool) -> None:
    weight = _plain(linear)
    if weight is not None and weight.device.type == "cpu" and (weight.stride(0) == 1) != input_major:
        weight.data = weight.data.t().contiguous().t() if input_major else weight.data.contiguous()


def _plain(linear: nn.Module) -> Tensor | None:
    """The weight of an ordinary linear layer, whole and on a device that computes."""
    if type(linear) is not nn.Linear or type(linear.weight.data) is not Tensor or linear.weight.device.type == "meta":
        return None
    return linear.weight
