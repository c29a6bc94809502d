"""The device and dtype of a model's weights, and whether they fit there."""

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlm.errors import UserError
from dlm.models.settings import settings_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LOWER = "quantise them (quantize), use a smaller dtype, tensor_parallel over several devices, or another device"
"""What makes weights fit."""


def pick_device(device: str | torch.device) -> torch.device:
    """A usable device, or an error that says which ones are."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
        if found.type == "meta":
            raise RuntimeError("it holds no data")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device={str(device)!r} cannot be used here ({reason}); use auto, cpu, cuda or mps") from error
    return torch.device("cpu") if found.type == "cpu" else found  # safetensors knows no "cpu:0"


def pick_dtype(dtype: str | torch.dtype, settings: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """The dtype of the weights in memory."""
    if isinstance(dtype, torch.dtype):
        return dtype
    stated = "float32" if device.type == "cpu" else settings.get("dtype") or settings.get("torch_dtype") or "float32"
    name = str(stated if dtype == "auto" else dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype={reprlib.repr(name)} is not known; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def stored_dtype(folder: Path) -> str:
    """The dtype that a checkpoint says its weights have."""
    settings = settings_of(folder)
    name = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in DTYPES else "float32"


def whole_memory(device: torch.device) -> int:
    """In bytes, whatever of it is in use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device) -> int:
    """In bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of freed weights is free too
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_of(network: nn.Module) -> int:
    """Of its weights and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())


def require_room(needed: int, device: torch.device, source: str | Path, fix: str = LOWER) -> None:
    """Raise UserError where weights of so many bytes do not fit: into what is free of a GPU, or into a CPU's whole memory,
    of which nobody knows what others will give back. `fix` says what helps."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return
    there, whole = (free_memory if device.type == "cuda" else whole_memory)(device), whole_memory(device)
    if needed > there:
        free = f"{there / 2**30:,.1f} GiB free of " if device.type == "cuda" else ""
        raise UserError(
            f"{source}: the weights take {needed / 2**30:,.1f} GiB, and {device} has {free}{whole / 2**30:,.1f} GiB in all; "
            f"{fix}"
        )


@contextmanager
def allocating(what_to_lower: Callable[[], str]) -> Iterator[None]:
    """Raises a UserError of this message where there is no memory left for what is done inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        raise UserError(what_to_lower()) from error
