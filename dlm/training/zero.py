"""Names DeepSpeed ZeRO's tensors, so that its state is saved and read like any
other. DeepSpeed's own files are pickles.

The optimiser's groups hold flat fp32 partitions in place of parameters, one to each process; in stage 3 the weights lie in
partitions as well. All names begin with the process's number: such a checkpoint belongs to its number of processes.
"""

from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn


def is_zero(a: Accelerator) -> bool:
    """Whether DeepSpeed drives this run."""
    return a.distributed_type == DistributedType.DEEPSPEED


def weights(a: Accelerator, module: nn.Module) -> dict[str, Tensor] | None:
    """This process's partitions of the weights, to be overwritten in place; None where it holds all weights."""
    parameters = dict(module.named_parameters())
    if not any(hasattr(p, "ds_tensor") for p in parameters.values()):
        return None
    tensors = {name: getattr(p, "ds_tensor", p).data for name, p in parameters.items()}
    return {f"{a.process_index}.{name}": tensor for name, tensor in (tensors | dict(module.named_buffers())).items()}


def partitions(a: Accelerator, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This process's flat fp32 partitions, in the order of the groups that they are cut from."""
    engine: Any = a.deepspeed_engine_wrapped.engine  # pyright: ignore[reportOptionalMemberAccess]
    # Stage 3 hands them to the optimiser's groups for the time of a step alone.
    spread = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    return spread or [partition for group in optimizer.param_groups for partition in group["params"]]


def optimizer_state(a: Accelerator, optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The optimiser's groups as plain data, and its partitions and their state as `process.number/key`."""
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    tensors = {}
    for number, partition in enumerate(partitions(a, optimizer)):
        name = f"{a.process_index}.{number}"
        tensors[f"{name}/partition"] = partition.data
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state.get(partition, {}).items()}
    return groups, tensors


def make_state(
    a: Accelerator, optimizer: torch.optim.Optimizer, entries: list[tuple[str, tuple[int, ...], torch.dtype]]
) -> None:
    """Give the optimiser the tensors of these names, shapes and types that it does not have yet."""
    mine = partitions(a, optimizer)
    for name, shape, dtype in entries:
        place, _, key = name.partition("/")
        process, number = map(int, place.split("."))
        if process == a.process_index and key != "partition":
            value = torch.zeros(shape, dtype=dtype, device=mine[number].device)
            optimizer.state[mine[number]].setdefault(key, value)
