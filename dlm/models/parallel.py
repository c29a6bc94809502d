"""Tensor parallelism on one node: each process holds its share of every layer's heads."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from dlm.errors import UserError
from dlm.models.config import ModelConfig
from dlm.models.transformer import Transformer

SPLIT_OUTPUTS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
SPLIT_INPUTS = ("attn.o_proj", "mlp.down_proj")


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
    return init_device_mesh(device.type, (size,)), device


def check_divisible(config: ModelConfig, size: int) -> None:
    """Raise UserError where the network cannot be split so many ways."""
    if config.moe is not None:
        raise UserError(f"tensor_parallel = {size}: mixtures of experts ({config.model_type}) cannot be split yet")
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise UserError(f"tensor_parallel = {size} does not divide {name} = {getattr(config, name)}")


def parallelise(network: Transformer, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """Keep this process's share of the weights, in place, on its device. Outputs stay whole in every process.

    Each layer's attention and feed-forward end in one sum over the processes (Megatron-LM, arXiv 1909.08053); nothing is
    sent to split the weights, since every process has read the same checkpoint.
    """
    check_divisible(network.config, mesh.size())
    styles: dict[str, ParallelStyle] = {f"layers.*.{name}": ColwiseParallel() for name in SPLIT_OUTPUTS}
    styles |= {f"layers.*.{name}": RowwiseParallel() for name in SPLIT_INPUTS}
    if network.lm_head is not None:
        styles["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(network, mesh, styles, src_data_rank=None)
    network.kv_heads //= mesh.size()
    network.group = mesh.get_group()
    return network.to(device)
