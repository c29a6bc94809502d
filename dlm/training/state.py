"""What a checkpoint holds of a run: tensors in safetensors, everything else in JSON. Nothing is ever unpickled.

model.safetensors and optimizer.safetensors are the weights and the optimiser's tensors; where they are spread out over
processes, model-I-of-N.safetensors is process I's part. Headers say which rows of each tensor lie in a file, so that any
number of processes can read them again. A header that says nothing has all rows.
state.json holds counters, the position in the data, the schedule and the optimiser's groups; random-I.json the random
generators of process I.
"""

import json
import random
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlm.errors import UserError
from dlm.training import plain, zero

STATE = "state.json"
FIX = "resume with the same model and config, give another train.out, or set train.resume = false"
Rows = tuple[int, int]  # the first row that lies here, and how many rows the whole tensor has


def not_finite(module: nn.Module) -> str | None:
    """The name of a weight that has a NaN or an infinity."""
    return _not_finite(dict(module.named_parameters()))


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    return next((name for name, tensor in tensors.items() if not _rows(tensor)[0].isfinite().all()), None)


class NotFinite(Exception):
    """A tensor that would be saved has a NaN or an infinity; the message is its name."""


def save(
    folder: Path, a: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer, own: dict[str, Any]
) -> None:
    """Write this process's part of a checkpoint; `own` is plain data, which the main process writes.

    NotFinite, before anything is written, if a weight or a tensor of the optimiser has a NaN or an infinity.
    """
    partitions = zero.weights(a, module)
    groups, tensors = zero.optimizer_state(a, optimizer) if zero.is_zero(a) else _optimizer_state(module, optimizer)
    if lost := not_finite(module) or _not_finite((partitions or {}) | tensors):
        raise NotFinite(lost)
    _save_part(folder, "model", a, module.state_dict() if partitions is None else partitions, partitions is not None)
    _save_part(folder, "optimizer", a, tensors, zero.is_zero(a))
    (folder / f"random-{a.process_index}.json").write_text(plain.dumps(_random_state(a)))
    if a.is_main_process:
        (folder / STATE).write_text(plain.dumps({**own, "processes": a.num_processes, "groups": groups}))


def load(folder: Path, a: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put weights, optimiser and random generators back as they were; returns `own`, as it was given to `save`."""
    own = plain.loads((folder / STATE).read_text())
    groups, processes = own.pop("groups"), own.pop("processes")
    if zero.is_zero(a):
        if processes != a.num_processes:
            raise UserError(
                f"{folder}: was written by {processes} processes of DeepSpeed, and {a.num_processes} are running now: start "
                "as many, or use configs/accelerate/fsdp2.yaml, whose checkpoints any number can read"
            )
        partitions = zero.weights(a, module)
        _load_into(folder, "model", module.state_dict() if partitions is None else partitions, partitions is not None)
        with _Parts(folder, "optimizer") as parts:  # of a new run the optimiser has no state yet
            zero.make_state(a, optimizer, [(name, parts.shape(name), parts.dtype(name)) for name in parts.where])
        _load_into(folder, "optimizer", zero.optimizer_state(a, optimizer)[1], True)
        for now, saved in zip(optimizer.param_groups, groups, strict=True):
            now.update(saved)
    else:
        _load_into(folder, "model", module.state_dict())
        _set_optimizer_state(folder, module, optimizer, groups)
    if processes == a.num_processes:  # no number of a run depends on them: each step is seeded anew
        _set_random_state(plain.loads((folder / f"random-{a.process_index}.json").read_text()), a)
    return own


# --- tensors, whole or in parts ---------------------------------------------------------------------------------------


def _rows(tensor: Tensor) -> tuple[Tensor, Rows]:
    """The values that lie in this process, and which rows of the whole tensor they are."""
    if not isinstance(tensor, DTensor):
        return tensor, (0, len(tensor) if tensor.ndim else 1)
    local, total, first = tensor.to_local(), tensor.shape[0], 0
    for size, place, placement in zip(
        tensor.device_mesh.shape, tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True
    ):
        if placement.is_shard(0):
            first = min(total, -(-total // size) * place)
        else:
            assert placement.is_replicate(), f"{placement} of {tuple(tensor.shape)}"
    return local, (first, total)


def _writes(tensor: Tensor, a: Accelerator) -> bool:
    """Whether this process is the one that writes the values that lie in it."""
    if not isinstance(tensor, DTensor):
        return a.is_main_process
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return tensor.to_local().numel() > 0 and all(place == 0 for place, p in places if p.is_replicate())


def _save_part(folder: Path, kind: str, a: Accelerator, tensors: Mapping[str, Tensor], all_mine: bool = False) -> None:
    """Write what of `tensors` lies in this process, or all of them where no other process has any part of them."""
    part, where = {}, {}
    for name, tensor in tensors.items():
        if not (all_mine or _writes(tensor, a)):
            continue
        local, rows = _rows(tensor)
        if local.ndim and len(local) < rows[1]:
            where[name] = rows
        part[name] = local.detach().cpu().contiguous()
    if part:
        spread = all_mine or any(isinstance(tensor, DTensor) for tensor in tensors.values())
        name = f"{kind}-{a.process_index}-of-{a.num_processes}" if spread else kind
        save_file(part, folder / f"{name}.safetensors", metadata={"rows": json.dumps(where)} if where else None)


def _load_into(folder: Path, kind: str, tensors: Mapping[str, Tensor], some: bool = False) -> None:
    """Overwrite every one of `tensors` by the rows that the parts in `folder` have of it.

    The parts must hold the same tensors, or with `some` all of these and others.
    """
    with _Parts(folder, kind) as parts, torch.no_grad():
        if other := sorted(tensors.keys() - parts.where.keys() if some else tensors.keys() ^ parts.where.keys()):
            raise UserError(
                f"{folder}: tensor {other[0]!r} is in this network or in the checkpoint, not in both; {FIX}"
            )
        for name, tensor in tensors.items():
            if (parts.shape(name), parts.dtype(name)) != (tuple(tensor.shape), tensor.dtype):
                raise UserError(
                    f"{folder}: {name!r} is {parts.dtype(name)} {parts.shape(name)}, but in this network "
                    f"{tensor.dtype} {tuple(tensor.shape)}; {FIX}"
                )
            parts.read_into(tensor, name)


class _Parts:
    """The files of one kind, open for reading: every tensor whole, wherever its rows lie."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.stack = ExitStack()
        self.where: dict[str, list[tuple[Rows, Any]]] = {}
        for path in (*folder.glob(f"{kind}.safetensors"), *folder.glob(f"{kind}-*-of-*.safetensors")):
            file = self.stack.enter_context(safe_open(path, framework="pt"))
            rows = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                values = file.get_slice(name)
                whole = (0, (values.get_shape() or [1])[0])
                self.where.setdefault(name, []).append((tuple(rows.get(name, whole)), values))
        for places in self.where.values():
            places.sort(key=lambda place: place[0])

    def __enter__(self) -> "_Parts":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        (_, total), values = self.where[name][0]
        return (total, *shape[1:]) if (shape := values.get_shape()) else ()

    def dtype(self, name: str) -> torch.dtype:
        return self._all(name)[:1].dtype if self.shape(name) else self._all(name).dtype

    def _all(self, name: str) -> Any:
        return self.where[name][0][1] if self.shape(name) else self.where[name][0][1][...]

    def read_into(self, tensor: Tensor, name: str) -> None:
        """In-place: the rows of `tensor` that lie in this process."""
        local, (first, _) = _rows(tensor)
        if not local.ndim:
            local.copy_(self._all(name))
            return
        for (start, _), values in self.where[name]:
            low, high = max(first, start), min(first + len(local), start + values.get_shape()[0])
            if low < high:
                local[low - first : high - first] = values[low - start : high - start].to(local.device)


# --- the optimiser ----------------------------------------------------------------------------------------------------


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[dict], dict[str, Tensor]]:
    """Its groups as plain data with names for parameters, and its tensors as `parameter/key`."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"names": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return groups, {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _set_optimizer_state(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, groups: list[dict]) -> None:
    parameters = dict(module.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    if [g.pop("names") for g in groups] != [[names[p] for p in g["params"]] for g in optimizer.param_groups]:
        raise UserError(f"{folder}: its optimiser groups hold other parameters; {FIX}")
    for now, saved in zip(optimizer.param_groups, groups, strict=True):
        now.update(saved)
    optimizer.state.clear()
    with _Parts(folder, "optimizer") as parts, torch.no_grad():
        for entry in parts.where:
            name, _, key = entry.rpartition("/")
            parameter, shape, dtype = parameters[name], parts.shape(entry), parts.dtype(entry)
            if shape == parameter.shape:  # spread out as the parameter is
                value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                value = torch.zeros(shape, dtype=dtype, device=parameter.device)
            parts.read_into(value, entry)
            optimizer.state[parameter][key] = value


# --- random generators ------------------------------------------------------------------------------------------------


def _random_state(a: Accelerator) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}
    state["torch"] = torch.get_rng_state().numpy().tobytes()
    if a.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(a.device).numpy().tobytes()
    return state


def _set_random_state(state: dict[str, Any], a: Accelerator) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if a.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), a.device)


def _bytes(values: bytes) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.uint8)
