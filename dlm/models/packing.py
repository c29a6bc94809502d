"""Weights side by side for decoding: the same values in fewer matrix products."""

import torch
from torch import Tensor, nn

from dlm.models.attention import Attention
from dlm.models.gated import SwiGLU
from dlm.models.transformer import MLP, Transformer

ALIGNMENT = 64


def pack(network: Transformer, launched: bool | None = None) -> None:
    """Put the weights of products with the same input side by side, in place.

    Layers with biases, and shared experts, only where products are `launched` (None: on a GPU): there each launch costs
    time, while a CPU's products might round otherwise for it.

    The parameters become views of the packed weights, so training and saving go on as before. The views must be
    contiguous: torch's fused optimisers take any parameter for that, and overwrite what lies beside others.
    A layer whose parameters were replaced since (another dtype or device, an adapter) keeps its single products.
    """
    with torch.no_grad():
        launched = network.embed.weight.is_cuda if launched is None else launched
        for module in network.modules():
            if isinstance(module, Attention):
                linears = module.q_proj, module.k_proj, module.v_proj
            elif isinstance(module, MLP) or (launched and isinstance(module, SwiGLU)):
                linears = module.gate_proj, module.up_proj
            else:
                continue
            biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
            if biases and not launched:
                continue
            module.packed, module.packed_bias = _side_by_side(module.packed, *linears), None
            if biases and module.packed is not None:
                module.packed_bias = together = torch.cat(biases)
                for bias, part in zip(biases, together.split([len(bias) for bias in biases]), strict=True):
                    bias.data = part


def align(network: nn.Module) -> None:
    """Move weights that begin at an odd address to one that is a multiple of 64 bytes, where torch allocates; in place.

    torch's products on a CPU round differently with the address of their operands, and a weight that is a piece of a
    mapped file begins anywhere. One tensor is copied at a time.
    """
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT:
                tensor.data = tensor.data.clone()


def _side_by_side(packed: Tensor | None, *linears: nn.Module) -> Tensor | None:
    """One weight of all; None where a layer is not plain or lies elsewhere."""
    weights = [weight for linear in linears if (weight := _plain(linear)) is not None]
    if len(weights) < len(linears):
        return None
    if packed is None or not _are_parts(weights, packed):
        packed = torch.cat(weights)
        for weight, part in zip(weights, packed.split([len(w) for w in weights]), strict=True):
            weight.data = part
    return packed


def _are_parts(weights: list[Tensor], packed: Tensor) -> bool:
    """Whether the weights are views of the packed one, in order."""
    if packed.dtype != weights[0].dtype:
        return False
    parts = packed.split([len(w) for w in weights])
    return all(w.data_ptr() == p.data_ptr() and w.stride() == p.stride() for w, p in zip(weights, parts, strict=True))


def _plain(linear: nn.Module) -> Tensor | None:
    """The weight of an ordinary linear layer, whole and on a device that computes."""
    if type(linear) is not nn.Linear or type(linear.weight.data) is not Tensor or linear.weight.device.type == "meta":
        return None
    return linear.weight
