"""Saves tensors, whole or sharded over processes, in safetensors files that any number of processes can read.

<kind>.safetensors holds whole tensors; where they are sharded, <kind>-I-of-N.safetensors is process I's part. A file's
header says which rows of a tensor it holds; it holds all rows of a tensor that is not named there.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlm.errors import UserError

FIX = "resume with the same model and config, give another train.out, or set train.resume = false"
Rows = tuple[int, int]  # the first row that lies here, and how many rows the whole tensor has


def rows_of(tensor: Tensor) -> tuple[Tensor, Rows]:
    """The values that lie in this process, and which rows of the whole tensor they are."""
    if not isinstance(tensor, DTensor):
        return tensor, (0, len(tensor) if tensor.ndim else 1)
    local, total, first = tensor.to_local(), tensor.shape[0], 0
    mesh = tensor.device_mesh
    for size, place, placement in zip(mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=True):
        if placement.is_shard(0):
            first = min(total, -(-total // size) * place)
        else:
            assert placement.is_replicate(), f"{placement} of {tuple(tensor.shape)}"
    return local, (first, total)


def writes(tensor: Tensor, a: Accelerator) -> bool:
    """Whether this process is the one that writes the values that lie in it."""
    if not isinstance(tensor, DTensor):
        return a.is_main_process
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return tensor.to_local().numel() > 0 and all(place == 0 for place, p in places if p.is_replicate())


def save_part(folder: Path, kind: str, a: Accelerator, tensors: Mapping[str, Tensor], all_mine: bool = False) -> None:
    """Write this process's part of `tensors`; with `all_mine` all of them, since no other process has a part."""
    part, where = {}, {}
    for name, tensor in tensors.items():
        if not (all_mine or writes(tensor, a)):
            continue
        local, rows = rows_of(tensor)
        if local.ndim and len(local) < rows[1]:
            where[name] = rows
        part[name] = local.detach().cpu().contiguous()
    if part:
        spread = all_mine or any(isinstance(tensor, DTensor) for tensor in tensors.values())
        name = f"{kind}-{a.process_index}-of-{a.num_processes}" if spread else kind
        save_file(part, folder / f"{name}.safetensors", metadata={"rows": json.dumps(where)} if where else None)


def load_into(folder: Path, kind: str, tensors: Mapping[str, Tensor], some: bool = False) -> None:
    """Overwrite every one of `tensors` by the rows that the parts in `folder` have of it.

    The parts must hold the same tensors; with `some` they may hold others, too.
    """
    with Parts(folder, kind) as parts, torch.no_grad():
        if other := sorted(tensors.keys() - parts.where.keys() if some else tensors.keys() ^ parts.where.keys()):
            raise UserError(f"{folder}: tensor {other[0]!r} is in this network or in the checkpoint, not both; {FIX}")
        for name, tensor in tensors.items():
            if (parts.shape(name), parts.dtype(name)) != (tuple(tensor.shape), tensor.dtype):
                raise UserError(
                    f"{folder}: {name!r} is {parts.dtype(name)} {parts.shape(name)}, but in this network "
                    f"{tensor.dtype} {tuple(tensor.shape)}; {FIX}"
                )
            parts.read_into(tensor, name)


class Parts:
    """The files of one kind, open for reading; a tensor is read whole, whichever files its rows are in."""

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

    def __enter__(self) -> "Parts":
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
        """In-place: fill this process's rows of `tensor`."""
        local, (first, _) = rows_of(tensor)
        if not local.ndim:
            local.copy_(self._all(name))
            return
        for (start, _), values in self.where[name]:
            low, high = max(first, start), min(first + len(local), start + values.get_shape()[0])
            if low < high:
                local[low - first : high - first] = values[low - start : high - start].to(local.device)
