"""What crosses between host and device: of a step's many small arrays one copy up, of its results one copy down."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

Arrays = Mapping[str, np.ndarray]
Part = tuple[tuple[int, ...], np.dtype, int]
"""An array's shape and dtype, and at which byte it begins."""
ALIGNED = 16
"""Bytes: where an array begins is a multiple of it, as kernels expect."""


class Transfers:
    """Copies of named arrays to a device and of tensors back.

    On a CUDA device all arrays of a call lie side by side in one pinned buffer, and its copy does not keep the host
    waiting. `down` is where the host waits: once a step. Elsewhere nothing is copied that need not be.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.remote = device, device.type == "cuda"
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.sent: torch.cuda.Event | None = None

    def up(self, arrays: Arrays, into: Tensor | None = None) -> dict[str, Tensor]:
        """The arrays as tensors on the device: parts of `into`, bytes that lie there, or of new memory."""
        if not self.remote:
            tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()}
            return tensors if self.device.type == "cpu" else {name: x.to(self.device) for name, x in tensors.items()}
        places, size = places_of(arrays)
        host = self.room(size)
        memory = host.numpy()
        for name, x in arrays.items():
            start = places[name]
            memory[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        there = torch.empty(size, dtype=torch.uint8, device=self.device) if into is None else into
        self.send(there, size)
        return views(there, arrays)

    def room(self, size: int) -> Tensor:
        """The pinned buffer, at least so many bytes; what was sent from it before has arrived."""
        if self.sent is not None:
            self.sent.synchronize()
        if len(self.buffer) < size:
            self.buffer = torch.empty(max(size, 1 << 16) * 3 // 2, dtype=torch.uint8, pin_memory=True)
        return self.buffer

    def send(self, there: Tensor, size: int) -> None:
        """Copy the first bytes of the pinned buffer; the host does not wait."""
        there[:size].copy_(self.buffer[:size], non_blocking=True)
        if self.sent is None:
            self.sent = torch.cuda.Event()
        self.sent.record()

    def down(self, tensors: Sequence[Tensor]) -> list[np.ndarray]:
        """The tensors in the host's memory, once the device has computed them."""
        if not self.remote:
            return [x.cpu().numpy() for x in tensors]
        return unpacked(packed(tensors), parts_of(tensors))


def places_of(arrays: Arrays) -> tuple[dict[str, int], int]:
    """Where each array begins when they lie side by side, and how many bytes all take."""
    places, size = {}, 0
    for name, x in arrays.items():
        places[name] = size
        size += -(-x.nbytes // ALIGNED) * ALIGNED
    return places, size


def views(there: Tensor, arrays: Arrays) -> dict[str, Tensor]:
    """The parts of a device's bytes that hold these arrays."""
    places, _ = places_of(arrays)
    return {
        name: there[places[name] : places[name] + x.nbytes].view(torch_dtype(x)).view(x.shape)
        for name, x in arrays.items()
    }


def torch_dtype(x: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, x.dtype)).dtype


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Asked for every array of every step."""
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors, side by side."""
    return torch.cat([x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8) for x in tensors])


def parts_of(tensors: Sequence[Tensor]) -> list[Part]:
    """Where among `packed` bytes which tensor lies."""
    start, found = 0, []
    for x in tensors:
        found.append((tuple(x.shape), numpy_dtype(x.dtype), start))
        start += x.numel() * x.element_size()
    return found


def unpacked(together: Tensor, parts: Sequence[Part]) -> list[np.ndarray]:
    """`packed` bytes in the host's memory, as arrays: the host waits for the device."""
    memory = together.cpu().numpy()
    return [np.ndarray(shape, kind, memory, start) for shape, kind, start in parts]
