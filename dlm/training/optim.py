"""Optimiser groups, AdamW and Muon in one optimiser with averaged weights, and the learning-rate schedule."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from dlm.errors import UserError
from dlm.training.config import GroupConfig, OptimConfig, TrainSection
from dlm.training.processes import share, whole
from dlm.training.trainable import Matrices


class Optimizer(torch.optim.Optimizer):
    """One optimiser with an algorithm for each group; DeepSpeed accepts no more than one optimiser.

    With `ema` the state of a parameter also holds its `average`, which is sharded and saved like the rest.
    """

    def __init__(self, groups: list[dict], config: OptimConfig, ema: float, bf16: bool) -> None:
        self.ema, self.parts = ema, {}
        adamw, muon = ([g for g in groups if g["algorithm"] == name] for name in ("adamw", "muon"))
        if adamw:
            betas = (config.beta1, config.beta2)
            self.parts["adamw"] = torch.optim.AdamW(adamw, betas=betas, eps=config.eps, fused=True)
        if muon:
            self.parts["muon"] = Muon(muon, bf16, momentum=config.momentum, ns_steps=config.ns_steps)
        super().__init__([*adamw, *muon], {})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for name, part in self.parts.items():  # loading and sharding have replaced groups and tensors
            part.state, part.param_groups = self.state, [g for g in self.param_groups if g["algorithm"] == name]
            part.step()
        if self.ema:
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if "average" in state:
                    state["average"].lerp_(parameter, 1 - self.ema)
                else:
                    state["average"] = parameter.detach().clone()

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the averaged weights and the current ones; called again, swap them back."""
        for parameter, state in self.state.items():
            if "average" in state:
                current = parameter.detach().clone()
                parameter.copy_(state["average"])
                state["average"].copy_(current)


class Muon(torch.optim.Muon):
    """torch's Muon, faster: Newton-Schulz iterations of all matrices of one shape at once, on a CPU in fp32 unless `bf16`.

    torch iterates matrix by matrix and always in bfloat16. On a CPU with bfloat16 units that is four times as fast as fp32,
    on one without them several times as slow. State and hyper-parameters are torch's own.
    """

    def __init__(self, params: Iterable, bf16: bool = False, **options) -> None:
        super().__init__(params, **options)
        self.bf16 = bf16

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                # A sharded matrix is gathered, since its rows cannot be done apart; each process then takes the same step.
                alike[parameter.shape].append((parameter, whole(update)))
            for (rows, columns), members in alike.items():
                stacked = torch.stack([u for _, u in members])
                updates = orthogonalise(stacked, group["ns_coefficients"], group["ns_steps"], self.bf16)
                lr = group["lr"] * 0.2 * math.sqrt(max(rows, columns))  # an AdamW step's typical size: one lr fits both
                for (parameter, _), update in zip(members, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(share(update, parameter), alpha=-lr)


def orthogonalise(updates: Tensor, coefficients: tuple[float, float, float], steps: int, bf16: bool = False) -> Tensor:
    """Newton-Schulz: each matrix of (n, r, c) moved towards the nearest (semi-)orthogonal one (Jordan et al., Muon).

    Computed in fp32, or in bfloat16 on a GPU and with `bf16`; the result has the updates' own type.
    """
    a, b, c = coefficients
    x = updates.to(torch.bfloat16 if bf16 or updates.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(updates.dtype)


def parameter_groups(network: nn.Module, matrices: Matrices) -> dict[str, list[nn.Parameter]]:
    """Every trained parameter once, under `hidden`, `embed`, `head` or `scalar`."""
    group_of = {id(p): name for name in ("head", "embed", "hidden") for p in matrices.get(name, ())}
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in ("hidden", "embed", "head", "scalar")}
    for parameter in network.parameters():
        if parameter.requires_grad:
            groups[group_of.get(id(parameter), "scalar")].append(parameter)
    return groups


def freeze(network: nn.Module, patterns: Iterable[str]) -> None:
    """Take the parameters of these modules out of training; a pattern matches whole parts of dotted names, with * and ?."""
    parameters = dict(network.named_parameters())
    for pattern in patterns:
        found = [p for name, p in parameters.items() if fnmatchcase(f".{name}.", f"*.{pattern}.*")]
        if not found:
            known = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name).rpartition(".")[0] for name in parameters)
            tied = " (the output head is the embedding)" if getattr(network, "lm_head", network) is None else ""
            raise UserError(f"optim.freeze = {pattern!r}: no such module; known: {', '.join(known)}{tied}")
        for parameter in found:
            parameter.requires_grad_(False)


def build_optimizer(
    network: nn.Module, matrices: Matrices, config: OptimConfig, lr: float, ema: float = 0.0, bf16: bool = False
) -> Optimizer:
    """AdamW for its groups and Muon for its own; frozen and empty groups left out. With `bf16` Muon computes in bfloat16."""
    freeze(network, config.freeze)
    groups = []
    for name, parameters in parameter_groups(network, matrices).items():
        group: GroupConfig = getattr(config, name)
        if group.lr_scale == 0:
            for parameter in parameters:
                parameter.requires_grad_(False)
        elif parameters:
            entry = {"params": parameters, "lr": lr * group.lr_scale, "weight_decay": group.weight_decay}
            groups.append(entry | {"algorithm": group.algorithm})
    if not groups:
        raise UserError("optim.freeze and the groups' lr_scale = 0 leave nothing to train")
    return Optimizer(groups, config, ema, bf16)


def lr_factor(step: int, config: TrainSection) -> float:
    """Learning rate of optimiser step `step` (from 0) over the peak: a warm-up, then what train.schedule says."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        left = min(1.0, (config.steps - step) / config.decay_steps)
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
    done = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
