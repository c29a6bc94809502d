"""Linear layers whose weights are int8 in groups: what the kernels in C multiply on a CPU, and torch elsewhere."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dlm.kernels.c import binding, products
from dlm.kernels.int8 import WORD, WholeWeight, int8_weight
from dlm.models.transformer import Transformer

WIDTH = 32
"""Outputs of a panel where there is no C to say."""


class Int8Linear(nn.Module):
    """y = x w^T + bias. The weight has 8 bits and every 64 of a row's numbers a scale: 8.5 bits a number."""

    def __init__(self, outputs: int, inputs: int, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.shape = self.out_features, self.in_features = outputs, inputs
        self.panels = nn.Parameter(torch.empty(0, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(0), requires_grad=False)
        self.bias = bias

    def take(self, weight: Float[Tensor, "n k"]) -> "Int8Linear":
        """Round a weight and keep the result."""
        found = int8_weight(weight.detach(), WIDTH if binding.library()[0] is None else products.panel_width())
        self.panels.data, self.scales.data = found.panels, found.scales
        return self

    @property
    def int8(self) -> WholeWeight:
        """The weight as it is kept."""
        return WholeWeight(self.panels.detach(), self.scales.detach(), self.shape)

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... n"]:
        return F.linear(x, self.int8.back(x.dtype), self.bias)


def rounds(linear: nn.Module) -> bool:
    """Whether a layer can be rounded: C reads four inputs at a time."""
    return type(linear) is nn.Linear and linear.in_features % WORD == 0


def replace(network: Transformer) -> dict[str, Int8Linear]:
    """Put int8 layers, still empty, in place of the network's; by the names of the weights that they are to take."""
    found = {}
    for name, module in list(network.named_modules()):
        if (name.startswith("layers.") or name == "lm_head") and rounds(module):
            assert isinstance(module, nn.Linear)
            found[f"{name}.weight"] = new = Int8Linear(module.out_features, module.in_features, module.bias)
            network.set_submodule(name, new)
    return found


def quantise(network: Transformer) -> None:
    """Round the layers' matrices and the head, in place; a head that is the embeddings is kept beside them."""
    weights: dict[str, Any] = {
        f"{name}.weight": module.weight for name, module in network.named_modules() if rounds(module)
    }
    for name, module in replace(network).items():
        module.take(weights.pop(name))
    round_tied_head(network)


def round_tied_head(network: Transformer) -> None:
    """Give a network whose head is its embeddings an int8 one of its own."""
    if network.lm_head is None and network.embed.weight.shape[1] % WORD == 0:
        network.lm_head = Int8Linear(*network.embed.weight.shape).take(network.embed.weight)  # type: ignore[assignment]
