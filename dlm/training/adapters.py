"""[adapter]: LoRA and QLoRA. Adapters are attached at a run's start; only they are trained, checkpointed and saved."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from dlm.errors import UserError
from dlm.models import adapters
from dlm.models.lm import LM
from dlm.models.loading import config_of
from dlm.models.quantise import quantise, require
from dlm.training.config import TrainConfig
from dlm.training.processes import SPREAD


def check(config: TrainConfig, a: Accelerator) -> None:
    """Raise UserError for an impossible combination, before anything is loaded."""
    kind, t = config.adapter.kind, config.train
    if kind == "none":
        return
    assert t.init_from is not None
    adapters.require()
    if kind == "qlora":
        if a.distributed_type in SPREAD:
            raise UserError('adapter.kind = "qlora": 4-bit matrices cannot be spread out; use "lora", or DDP')
        require("nf4", a.device, config_of(t.init_from))
    if Path(t.out).resolve() == Path(t.init_from).expanduser().resolve():
        raise UserError(f"train.out = {t.out!r} is the model that is adapted, train.init_from: choose another folder")


def attach(config: TrainConfig, lm: LM, device: torch.device) -> None:
    """Put adapters into the model; only they will be trained."""
    c = config.adapter
    if c.kind == "none":
        return
    if c.kind == "qlora":
        quantise(lm.network, "nf4", device, c.double_quant)
    targets = c.targets or adapters.PROJECTIONS
    adapters.attach(lm.network, c.r, c.alpha, c.dropout, targets, base=str(config.train.init_from))


def keep_trained(module: nn.Module) -> None:
    """Leave frozen weights out of checkpoints: they are in the base model, and 4-bit ones cannot be read back."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}

    def forget(_: nn.Module, state: dict, prefix: str, __: object) -> None:
        for name in [n for n in state if n.removeprefix(prefix) not in trained]:
            del state[name]

    module.register_state_dict_post_hook(forget)
    module.register_load_state_dict_post_hook(lambda _, found: found.missing_keys.clear())


def save(config: TrainConfig, lm: LM, out: Path) -> None:
    """Write the model, or the adapters alone; with adapter.merge also the merged model."""
    dtype = config.train.save_dtype
    lm.save(out, dtype=dtype, overwrite=True, code=True)
    if config.adapter.merge:
        adapters.merge(lm.network)
        lm.save(out / "merged", dtype=dtype, overwrite=True, code=True)
