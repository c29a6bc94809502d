"""The layers' matrices in 8 or 4 bits through torchao: weights alone are rounded, products are in the weights' dtype."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

GROUP = 64
"""Numbers of a row that share a scale, in 4 bits. In 8 bits a whole row does."""


def _fp8(package: Any, device: torch.device) -> Any:
    return package.Float8WeightOnlyConfig()


def _int8(package: Any, device: torch.device) -> Any:
    return package.Int8WeightOnlyConfig()


def _int4(package: Any, device: torch.device) -> Any:
    if device.type == "cuda":  # two numbers a byte, in the order that tensor cores read; bfloat16 only
        return package.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    from torchao.quantization.granularity import PerGroup

    four: Any = vars(torch)["int4"]  # pyright does not know it
    return package.IntxWeightOnlyConfig(weight_dtype=four, granularity=PerGroup(GROUP))


CONFIGS: dict[str, Callable[[Any, torch.device], Any]] = {
    "torchao-fp8": _fp8,
    "torchao-int8": _int8,
    "torchao-int4": _int4,
}
"""What `quantize` may name. On a CPU 4 bits save no memory: torchao keeps each in a byte."""


def package() -> Any:
    """torchao's quantisation. Raises ImportError where it is not installed."""
    with _quiet():
        from torchao import quantization
    return quantization


def quantise(modules: nn.Module, kind: str, device: torch.device) -> None:
    """Round the weights of all linear layers, in place, one after the other on `device`."""
    found = package()
    config = CONFIGS[kind](found, device)
    with torch.no_grad():
        found.quantize_(modules, config, filter_fn=lambda module, name: type(module) is nn.Linear, device=device)


def is_rounded(weight: Tensor) -> bool:
    """Whether a weight is one of torchao's."""
    return type(weight.data).__module__.startswith("torchao.")


def parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a weight: itself, this process's share of it, or numbers and scales."""
    weight = getattr(weight, "_local_tensor", weight)
    if not is_rounded(weight):
        yield weight
        return
    for name in weight.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue]
        yield from parts(getattr(weight, name))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torchao logs of kernels for other machines when it is imported."""
    rooms = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [room.level for room in rooms]
    try:
        for room in rooms:
            room.setLevel(logging.CRITICAL)
        yield
    finally:
        for room, level in zip(rooms, levels, strict=True):
            room.setLevel(level)
