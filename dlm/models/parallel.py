"""Tensor and expert parallelism on one node: each process holds its share of every layer's heads, and of its experts."""

import atexit
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dlm.errors import UserError
from dlm.models.config import ModelConfig
from dlm.models.device import bytes_of, require_room
from dlm.models.moe import MoE
from dlm.models.transformer import Layer, Transformer

LAST_WORDS = 0.1
"""Seconds that gloo's threads get to drop what they have sent."""


def join(size: int, device: torch.device) -> tuple[DeviceMesh, torch.device]:
    """The group of `size` processes this one was started in (by torchrun), and the device that is its own."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) != size:
            raise UserError(
                f"tensor_parallel = {size} needs so many processes: start them with torchrun --nproc-per-node {size} …"
            )
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_world_size() != size:
        raise UserError(f"tensor_parallel = {size}, and {dist.get_world_size()} processes run: make them equal")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        torch.cuda.set_device(device)
    leave_at_exit()
    return init_device_mesh(device.type, (size,)), device


def leave_at_exit() -> None:
    """Have this process leave its groups before the interpreter ends, however often this is called."""
    atexit.unregister(leave)
    atexit.register(leave)


def leave() -> None:
    """Leave all process groups; after an error that nobody caught, without waiting for the others.

    A thread of gloo's drops the tensors of a collective after those who wait for it have gone on, and needs the interpreter
    for that: one that has begun to end aborts the process ("terminate called without an active exception"). Whoever refers
    to a group keeps its threads alive, so they cannot be joined.
    """
    failed = hasattr(sys, "last_value")
    if dist.is_initialized() and not (failed and dist.get_backend() == "nccl"):  # whose end waits for all processes
        dist.destroy_process_group()
    time.sleep(LAST_WORDS)


def check_divisible(config: ModelConfig, size: int) -> None:
    """Raise UserError where the network cannot be split so many ways."""
    wanted = {name: getattr(config, name) for name in ("num_key_value_heads", "num_attention_heads")}
    if (moe := config.moe) is not None:
        wanted |= {"num_experts": moe.num_experts}
        wanted |= {"the shared experts' width": moe.num_shared_experts * moe.intermediate_size}
    if moe is None or moe.first_k_dense:
        wanted |= {"intermediate_size": config.intermediate_size}
    for name, number in wanted.items():
        if number % size:
            raise UserError(f"tensor_parallel = {size} does not divide {name} = {number}")


def parallelise(network: Transformer, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """Keep this process's share of the weights, in place, on its device. Outputs stay whole in every process.

    Each layer's attention and feed-forward end in one sum over the processes (Megatron-LM, arXiv 1909.08053), to which a
    mixture adds those of its experts that lie here; nothing is sent to split the weights, since every process has read the
    same checkpoint.
    """
    check_divisible(network.config, mesh.size())
    share = Share(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    with torch.no_grad():
        for layer in network.modules():
            if not isinstance(layer, Layer):
                continue
            share.split((layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj), layer.attn.o_proj).add_up(
                layer.attn.o_proj
            )
            if isinstance(mlp := layer.mlp, MoE):
                share.experts(mlp)
            else:
                share.split((mlp.gate_proj, mlp.up_proj), mlp.down_proj).add_up(mlp.down_proj)
        if network.lm_head is not None and len(network.lm_head.weight) % share.size == 0:
            share.outputs(network.lm_head)
            network.lm_head.register_forward_hook(share.side_by_side)
    network.kv_heads //= share.size
    network.group = share.group
    require_room(bytes_of(network), device, f"process {share.rank}'s share of the layers")
    return network.to(device)


@dataclass(frozen=True)
class Share:
    """What one of `size` processes keeps of each weight."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def part(self, weight: Tensor, dim: int = 0) -> nn.Parameter:
        """A copy of this process's part, so that the whole can go."""
        return nn.Parameter(weight.chunk(self.size, dim)[self.rank].clone(), requires_grad=weight.requires_grad)

    def outputs(self, linear: nn.Linear) -> None:
        """Keep some of a layer's outputs."""
        linear.weight, linear.out_features = self.part(linear.weight), linear.out_features // self.size
        if linear.bias is not None:
            linear.bias = self.part(linear.bias)

    def split(self, first: Iterable[nn.Linear], second: nn.Linear) -> "Share":
        """Keep some of the first layers' outputs, and the second's inputs that are made of them."""
        for linear in first:
            self.outputs(linear)
        second.weight, second.in_features = self.part(second.weight, 1), second.in_features // self.size
        if second.bias is not None and self.rank:
            second.bias.zero_()  # added once
        return self

    def add_up(self, linear: nn.Linear) -> None:
        """The layer gives the sum of what it gives in all processes."""
        linear.register_forward_hook(self._sum)

    def experts(self, mixture: MoE) -> None:
        """Keep some experts, and a part of the shared ones; the mixture sums by itself."""
        each = len(mixture.experts.down) // self.size
        mixture.first, mixture.group = self.rank * each, self.group
        mixture.experts.gate_up, mixture.experts.down = map(self.part, (mixture.experts.gate_up, mixture.experts.down))
        if (shared := mixture.shared) is not None:
            self.split((shared.gate_proj, shared.up_proj), shared.down_proj)

    def side_by_side(self, module: nn.Module, inputs: object, out: Tensor) -> Tensor:
        """All processes' outputs."""
        parts = [torch.empty_like(out) for _ in range(self.size)]
        dist.all_gather(parts, out.contiguous(), self.group)
        return torch.cat(parts, dim=-1)

    def _sum(self, module: nn.Module, inputs: object, out: Tensor) -> Tensor:
        dist.all_reduce(out, group=self.group)
        return out
