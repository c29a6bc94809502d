"""Saves and loads a run's state: tensors in safetensors, everything else in JSON. Nothing is ever unpickled.

model.safetensors and optimizer.safetensors (or their parts, see `tensors`) are the weights and the optimiser's tensors,
state.json counters, the position in the data, the schedule and the optimiser's groups. Random generators are not among
them: each step seeds them anew.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from dlm.errors import UserError
from dlm.training import zero
from dlm.training.tensors import FIX, Parts, load_into, rows_of, save_part

STATE = "state.json"
TUPLE, BYTES, PAIRS = "__tuple__", "__bytes__", "__pairs__"


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that has a NaN or an infinity."""
    return next((name for name, tensor in tensors if not rows_of(tensor)[0].isfinite().all()), None)


class NotFinite(Exception):
    """A tensor that would be saved has a NaN or an infinity; the message is its name."""


def save(folder: Path, a: Accelerator, module: nn.Module, optimizer: Optimizer, own: dict[str, Any]) -> None:
    """Write this process's part of a checkpoint; `own` is plain data, which the main process writes.

    NotFinite, before anything is written, if a weight or a tensor of the optimiser has a NaN or an infinity.
    """
    partitions = zero.weights(a, module)
    groups, tensors = zero.optimizer_state(a, optimizer) if zero.is_zero(a) else _optimizer_state(module, optimizer)
    if lost := not_finite([*module.named_parameters(), *(partitions or {}).items(), *tensors.items()]):
        raise NotFinite(lost)
    save_part(folder, "model", a, module.state_dict() if partitions is None else partitions, partitions is not None)
    save_part(folder, "optimizer", a, tensors, zero.is_zero(a))
    if a.is_main_process:
        (folder / STATE).write_text(dumps({**own, "processes": a.num_processes, "groups": groups}))


def load(folder: Path, a: Accelerator, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Put weights and optimiser back as they were; returns `own`, as it was given to `save`."""
    own = loads((folder / STATE).read_text())
    groups, processes = own.pop("groups"), own.pop("processes")
    if zero.is_zero(a):
        if processes != a.num_processes:
            raise UserError(
                f"{folder}: was written by {processes} processes of DeepSpeed, and {a.num_processes} are running now: start "
                "as many, or use configs/accelerate/fsdp2.yaml, whose checkpoints any number can read"
            )
        partitions = zero.weights(a, module)
        load_into(folder, "model", module.state_dict() if partitions is None else partitions, partitions is not None)
        with Parts(folder, "optimizer") as parts:  # a new run's optimiser has no state yet
            zero.make_state(a, optimizer, [(name, parts.shape(name), parts.dtype(name)) for name in parts.where])
        load_into(folder, "optimizer", zero.optimizer_state(a, optimizer)[1], True)
        for now, saved in zip(optimizer.param_groups, groups, strict=True):
            now.update(saved)
    else:
        load_into(folder, "model", module.state_dict())
        _set_optimizer_state(folder, module, optimizer, groups)
    return own


def _optimizer_state(module: nn.Module, optimizer: Optimizer) -> tuple[list[dict], dict[str, Tensor]]:
    """The groups as plain data, with names for parameters, and the tensors as `parameter/key`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"names": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return groups, {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _set_optimizer_state(folder: Path, module: nn.Module, optimizer: Optimizer, groups: list[dict]) -> None:
    parameters = dict(module.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    if [g.pop("names") for g in groups] != [[names[p] for p in g["params"]] for g in optimizer.param_groups]:
        raise UserError(f"{folder}: its optimiser groups hold other parameters; {FIX}")
    for now, saved in zip(optimizer.param_groups, groups, strict=True):
        now.update(saved)
    optimizer.state.clear()
    with Parts(folder, "optimizer") as parts, torch.no_grad():
        for entry in parts.where:
            name, _, key = entry.rpartition("/")
            parameter, shape, dtype = parameters[name], parts.shape(entry), parts.dtype(entry)
            if shape == parameter.shape:  # spread out as the parameter is
                value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                value = torch.zeros(shape, dtype=dtype, device=parameter.device)
            parts.read_into(value, entry)
            optimizer.state[parameter][key] = value


def dumps(value: Any) -> str:
    """JSON of numbers, strings, None, bytes, lists, tuples and dicts; anything else is a UserError."""
    return json.dumps(_encode(value, "state"))


def loads(text: str) -> Any:
    return json.loads(text, object_hook=_decode)


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Integral):  # numpy's
        return int(value)
    if isinstance(value, bytes):
        return {BYTES: b64encode(value).decode("ascii")}
    if isinstance(value, (list, tuple)):
        entries = [_encode(entry, f"{where}[{n}]") for n, entry in enumerate(value)]
        return {TUPLE: entries} if isinstance(value, tuple) else entries
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: _encode(entry, f"{where}.{key}") for key, entry in value.items()}
        return {PAIRS: [[_encode(k, where), _encode(v, f"{where}.{k}")] for k, v in value.items()]}
    raise UserError(f"{where} is a {type(value).__name__}, which no checkpoint holds: make it a string or a number")


def _decode(table: dict[str, Any]) -> Any:
    if len(table) == 1:
        ((key, value),) = table.items()
        if key == TUPLE:
            return tuple(value)
        if key == BYTES:
            return b64decode(value)
        if key == PAIRS:
            return dict(value)
    return table
