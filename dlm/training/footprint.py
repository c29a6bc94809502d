"""How much memory a training step needs on each device, by what it is for, before anything is allocated there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm.models.attention import rotate
from dlm.models.config import ModelConfig
from dlm.models.transformer import Transformer

MOMENTS = {"adamw": 2, "muon": 1}
"""Numbers that an optimiser keeps for each parameter, as wide as it."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process; the first four are divided among processes where weights are sharded."""

    parameters: int
    gradients: int
    optimiser: int
    """The optimiser's state, and the averaged weights."""
    activations: int
    """What one micro-batch's forward keeps for its backward pass, the weights rounded for it included."""

    @property
    def whole(self) -> int:
        return self.parameters + self.gradients + self.optimiser + self.activations

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimiser", "activations")
        parts = ", ".join(f"{name} {getattr(self, name) / 2**30:.2f}" for name in names)
        return f"memory: {parts} GiB, {self.whole / 2**30:.2f} together"


def plan(
    network: nn.Module,
    groups: list[dict[str, Any]],
    *,
    sequences: int,
    positions: int,
    bf16: bool,
    average: bool = False,
    shards: int = 1,
) -> TrainingMemory:
    """The plan of a network whose parameters lie in these optimiser groups.

    A micro-batch has `sequences` of `positions` that go through the network (twice a text's length for two streams).
    `shards` processes share weights, gradients and states. `network` may lie on "meta".
    """
    weights = sum(x.numel() * x.element_size() for x in network.parameters())
    trained = [(p.numel() * p.element_size(), group["algorithm"]) for group in groups for p in group["params"]]
    states = sum(size * (MOMENTS[algorithm] + average) for size, algorithm in trained)
    kept = 0
    if isinstance(network, Transformer):
        kept = activation_bytes(network.config, sequences, positions, bf16, network.gradient_checkpointing)
    return TrainingMemory(weights // shards, sum(size for size, _ in trained) // shards, states // shards, kept)


def activation_bytes(
    config: ModelConfig, sequences: int, positions: int, bf16: bool, checkpointing: bool = False
) -> int:
    """What a network of this shape keeps of a forward for its backward pass, in bytes.

    One layer, and what stands around the layers, is run on tensors without data; with `checkpointing` a layer keeps its
    input only, and one of them all that it needs. The loss adds little: logits are computed again in the backward pass.
    """
    if config.moe is not None:  # each position meets as many experts as one wide feed-forward has room for
        m = config.moe
        wide = (m.num_experts_per_tok + m.num_shared_experts) * m.intermediate_size
        config = config.model_copy(update={"moe": None, "intermediate_size": wide})
    one, two = (_kept(config.model_copy(update={"num_hidden_layers": n}), sequences, positions, bf16) for n in (1, 2))
    layer, layers = two - one, config.num_hidden_layers
    if not checkpointing:
        return one + (layers - 1) * layer
    return one + (layers - 1) * sequences * positions * config.hidden_size * 4


def _kept(config: ModelConfig, sequences: int, positions: int, bf16: bool) -> int:
    with torch.device("meta"):
        network = Transformer(config)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        for module in network.modules():
            for name, weight in module.named_parameters(recurse=False):
                module.register_parameter(name, nn.Parameter(torch.empty(weight.shape)))
        own = {x.untyped_storage()._cdata for x in network.parameters()}
        ids = torch.zeros(sequences, positions, dtype=torch.int64)
        with saved(own) as sizes, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            network.hidden(ids, attend=_attend(network, ids))
        return sum(sizes.values())


def _attend(network: Transformer, ids: Tensor) -> Any:
    """Attention that keeps what a fused kernel keeps: queries, keys, values, the result, and a number a row and head."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    rope = network.rope_of(positions, torch.float32)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rope is not None:
            q, k = (rotate(x, *rope) for x in (q, k))
        out = _Fused.apply(q, k, v)
        assert isinstance(out, Tensor)
        return out

    return attend


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("only the forward is run, to count what it keeps")


@contextmanager
def saved(own: set[int]) -> Iterator[dict[int, int]]:
    """The bytes of each storage that is kept for a backward pass, but for those in `own`."""
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no storage's number is given twice

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
            alive.append(x.detach())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found
