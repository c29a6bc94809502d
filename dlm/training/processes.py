"""One process or many: sets up DDP, FSDP2 or DeepSpeed as `accelerate launch` was told to."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dlm.errors import UserError
from dlm.kernels.c.trained import no_halves
from dlm.models.device import pick_device
from dlm.models.parallel import leave_at_exit
from dlm.training import folder
from dlm.training.checkpoint import Group
from dlm.training.config import TrainConfig
from dlm.training.trainable import Trainable, class_of

SPREAD = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""No process holds all weights on its device; these two move the weights there themselves."""


def start(config: TrainConfig) -> Accelerator:
    """This process's Accelerator, with random generators seeded; a UserError where launcher and config do not fit."""
    t = config.train
    AcceleratorState._reset_state(True)  # a notebook's second run may differ in device and precision
    cpu = pick_device(t.device).type == "cpu"
    if cpu and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise UserError("DeepSpeed needs GPUs; on a CPU use configs/accelerate/cpu-2.yaml or fsdp2.yaml")
    if t.precision == "fp16":
        why = no_halves() if cpu else f"train.device = {t.device!r} is a GPU"
        if why is not None:
            raise UserError(
                f'train.precision = "fp16" is for a CPU that multiplies halves: {why}; use "fp32" or "bf16"'
            )
    a = Accelerator(
        cpu=cpu,
        mixed_precision="bf16" if t.precision == "bf16" else "no",
        log_with=list(config.log.trackers) or None,
        project_dir=t.out,
    )
    if a.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate shards on accelerators alone, though its code and torch's work on a CPU as well.
        a.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        a.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    if a.distributed_type == DistributedType.FSDP:
        _prepare_fsdp(a, class_of(config).layerwise)
    elif a.distributed_type == DistributedType.DEEPSPEED:
        _prepare_deepspeed(a, config, class_of(config).layerwise)
    set_seed(t.seed)
    if a.num_processes > 1:
        leave_at_exit()
    return a


def _prepare_fsdp(a: Accelerator, layerwise: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin: Any = a.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise UserError("fsdp_version: 1 is not supported: set fsdp_version: 2, as configs/accelerate/fsdp2.yaml does")
    if not layerwise:
        plugin.auto_wrap_policy = plugin.transformer_cls_names_to_wrap = None
    if a.mixed_precision == "bf16":  # accelerate's own would also round gradients' sums and the loss to bfloat16
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _prepare_deepspeed(a: Accelerator, config: TrainConfig, layerwise: bool) -> None:
    """Give DeepSpeed the config's batch size and clipping, which it applies itself."""
    if not layerwise:
        raise UserError(
            "a draft or a latent model cannot be trained with DeepSpeed, which gathers weights for a layer's own forward "
            "alone: use configs/accelerate/fsdp2.yaml or ddp.yaml"
        )
    t = config.train
    for key, value, instead in (
        ("optim.hidden.algorithm", config.optim.hidden.algorithm, "adamw"),
        ("train.ema", t.ema, 0.0),
    ):
        if value != instead:  # ZeRO lays the weights out flat, where there are neither matrices nor names
            raise UserError(
                f"{key} = {value!r} is not possible with DeepSpeed: set {instead!r}, or use configs/accelerate/fsdp2.yaml"
            )
    plugin: Any = a.state.deepspeed_plugin
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": micro_batch_size(config, a),
        "gradient_accumulation_steps": 1,  # the loss is already a share of the step's loss
        "gradient_clipping": t.clip,
    }


def check_compiler(device: torch.device) -> None:
    """Raise UserError where torch.compile would find no C++ compiler, which it needs on a CPU."""
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    if device.type == "cpu" and not any(shutil.which(name) for name in names if name):
        raise UserError(
            "train.compile = true needs a C++ compiler on a CPU: apt install g++, or set train.compile = false"
        )


def say(a: Accelerator, text: str) -> None:
    """Print a line that every user must see, once."""
    if a.is_main_process:
        print(text, file=sys.stderr, flush=True)


def micro_batch_size(config: TrainConfig, a: Accelerator) -> int:
    """Sequences a forward in each process."""
    t = config.train
    share = t.batch_size // a.num_processes
    micro = t.micro_batch_size or share
    if share == 0 or share % micro:
        raise UserError(
            f"train.batch_size = {t.batch_size} over {a.num_processes} processes is {share} sequences each, "
            f"not a multiple of train.micro_batch_size = {micro}"
        )
    return micro


def agree(a: Accelerator, checkpoints: list[Path], out: str) -> None:
    """Raise UserError unless every process finds the same checkpoints."""
    mark = crc32(" ".join(path.name for path in checkpoints).encode()) % 2**16  # sums of it are exact in fp32
    if sum_over_processes(a, torch.tensor(float(mark), device=a.device)) != mark * a.num_processes:
        raise UserError(
            f"train.out = {out!r} is not the same folder for all processes: on several machines it must be a shared one"
        )


def group(a: Accelerator) -> Group:
    """The processes as the `Group` that `checkpoint` works with."""

    def all_well(well: bool) -> bool:
        return (
            well if a.num_processes == 1 else sum_over_processes(a, torch.tensor(float(not well), device=a.device)) == 0
        )

    return Group(a.process_index, a.num_processes, all_well)


@contextmanager
def claimed(a: Accelerator, config: TrainConfig) -> Iterator[None]:
    """Lock the run folder for this run. The main process does it; if it cannot, all processes stop."""
    with ExitStack() as stack:
        failure = None
        try:
            if a.is_main_process:
                stack.enter_context(folder.claimed(Path(config.train.out)))
        except UserError as error:
            failure = error
        if not group(a).all_well(failure is None):
            raise failure or UserError("the main process could not begin: its message says why")
        yield


@contextmanager
def exchanging(a: Accelerator, module: nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward: exchange gradients only after the last micro-batch of a step."""
    a.sync_gradients = last  # DeepSpeed steps when this is True
    if last:
        yield
    else:
        with a.no_sync(module):
            yield


class Whole:
    """Gathers all weights in the main process, for validation, samples and the final model."""

    def __init__(self, a: Accelerator, model: Trainable) -> None:
        self.accelerator, self.model, self.empty = a, model, None
        if a.distributed_type in SPREAD:  # a copy without values, made before the weights are spread out
            self.empty = deepcopy(model.network).to("meta")

    def __call__(self, prepared: nn.Module) -> Trainable | None:
        """The model in the main process, None in the others; each of them has to call this."""
        a = self.accelerator
        if self.empty is None:
            return self.model if a.is_main_process else None
        weights = a.get_state_dict(prepared)
        if not a.is_main_process:
            return None
        network, prefix = deepcopy(self.empty), "network."
        ours = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        network.load_state_dict(ours, assign=True)
        for name, buffer in self.model.network.named_buffers():
            if name not in ours:  # the weights of a folder do not hold it
                owner, _, own = name.rpartition(".")
                network.get_submodule(owner)._buffers[own] = buffer
        model = copy(self.model)
        model.network = network.to(a.device)
        return model


def whole(tensor: Tensor) -> Tensor:
    """All values of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(values: Tensor, like: Tensor) -> Tensor:
    """This process's part of `values`, which every process has whole, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return values
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


def sum_over_processes(a: Accelerator, value: Tensor) -> float:
    """The sum of a scalar over all processes."""
    total = a.reduce(value, "sum")
    assert isinstance(total, Tensor)
    return total.item()
