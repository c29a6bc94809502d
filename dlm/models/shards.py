"""Finds the weight files of a checkpoint, safetensors or GGUF, and reads what they declare, but no weights."""

import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlm.data.gguf import is_gguf
from dlm.errors import UserError
from dlm.models.gguf import weights_of
from dlm.models.gguf_weights import parts_of
from dlm.models.settings import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
KINDS = ("F64", "F32", "F16", "BF16")
"""How weights are stored, by safetensors' names."""
DTYPES = dict(zip(KINDS, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True))
PIECE = 2**24
"""Bytes read at a time."""
MOST_HEADER = 32 * 2**20
"""Bytes of a header; 100,000 tensors take 15 MB."""


@dataclass(frozen=True)
class Declared:
    """What a header says of one tensor."""

    shape: tuple[int, ...]
    kind: str
    file: Path


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint's folder; of a GGUF file itself and its other parts."""
    if is_gguf(folder):
        return parts_of(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(f"{folder / INDEX} has no weight_map")
        for name in shards.values():
            if not isinstance(name, str) or not _inside(name):
                raise UserError(
                    f"{folder / INDEX}: weight_map has {reprlib.repr(name)}; only safetensors files in the checkpoint's "
                    "folder are read"
                )
        files = [folder / name for name in sorted(set(shards.values()))]
        if not files:
            raise UserError(f"{folder / INDEX}: weight_map is empty")
        for file in files:
            if not file.is_file():
                raise UserError(f"{file} is missing, but {INDEX} lists it: download or copy the checkpoint again")
        return files
    if any(folder.glob("pytorch_model*.bin")):
        raise UserError(f"{folder} has only pytorch_model.bin weights; convert them to safetensors first")
    raise UserError(f"{folder} has no {WEIGHTS} and no {INDEX}")


def _inside(name: str) -> bool:
    """Whether the name is of a file in the folder itself, on every operating system."""
    plain = PurePosixPath(name).name == name and PureWindowsPath(name).name == name
    return plain and name.endswith(".safetensors") and name.isprintable() and len(name) < 256


def declared(files: list[Path]) -> dict[str, Declared]:
    """Every declared tensor by its name in the checkpoint. Reads headers only."""
    found: dict[str, Declared] = {}
    for file in files:
        with opened(file, torch.device("cpu")) as shard:
            for name in shard.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                if name in found:
                    raise UserError(f"{file} has a tensor {name!r} that {found[name].file.name} has too")
                part = shard.get_slice(name)
                found[name] = Declared(tuple(part.get_shape()), part.get_dtype(), file)
    return found


class _OnHost:
    """A file's tensors, read in pieces: what is mapped stays in memory until the file is closed, and what is read does not."""

    def __init__(self, file: Path, header: int, shard: Any) -> None:
        self.keys, self.get_slice, self.get_tensor = shard.keys, shard.get_slice, shard.get_tensor
        self.file, self.first = file, 8 + header
        with file.open("rb") as raw:
            raw.seek(8)
            self.header = json.loads(raw.read(header))

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """The tensor in runs of its first axis, each with the number of its first one."""
        facts = self.header[name]
        shape, dtype = facts["shape"], DTYPES.get(facts["dtype"])
        if not shape or dtype is None or 0 in shape:
            yield 0, self.get_tensor(name)
            return
        each = dtype.itemsize * prod(shape[1:])
        count = max(1, PIECE // each)
        with self.file.open("rb", buffering=0) as raw:
            raw.seek(self.first + facts["data_offsets"][0])
            for start in range(0, shape[0], count):
                piece = torch.empty(min(count, shape[0] - start), *shape[1:], dtype=dtype)
                place = piece.view(-1).view(torch.uint8).numpy().data
                while len(place):
                    if not (done := raw.readinto(place)):
                        raise OSError(f"it ends within {name!r}")
                    place = place[done:]
                yield start, piece


@contextmanager
def opened(file: Path, device: torch.device) -> Iterator[Any]:
    """A file's tensors, read to `device` one by one; errors name the file."""
    if is_gguf(file):
        yield weights_of(file, device)
        return
    try:
        with file.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
        if MOST_HEADER < length <= file.stat().st_size:  # a longer one than the file is an error of safetensors' own
            raise UserError(f"{file} has a header of {length:,} bytes; more than {MOST_HEADER:,} are not read")
        with safe_open(file, framework="pt", device=str(device)) as shard:
            yield _OnHost(file, length, shard) if device.type == "cpu" else shard
    except MemoryError as error:
        raise UserError(f"{file} has {file.stat().st_size:,} bytes, more than can be mapped here: {error}") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a whole safetensors file: {error}; download or copy it again") from error
