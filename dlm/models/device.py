"""The device and dtype of a model's weights, and whether they fit there."""

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dlm.errors import UserError
from dlm.models.settings import settings_of
from dlm.models.transformer import Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


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


def require_room(
    network: Transformer,
    device: torch.device,
    source: str | Path,
    fix: str = "use a smaller dtype, or tensor_parallel over several devices",
) -> None:
    """Raise UserError where the weights are larger than the device's whole memory; `fix` says what helps."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > there:
        raise UserError(
            f"{source}: the weights take {needed / 2**30:,.1f} GiB, and {device} has {there / 2**30:,.1f} GiB in all; "
            f"{fix}"
        )
