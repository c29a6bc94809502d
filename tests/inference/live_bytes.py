"""How many bytes of tensors are alive at a time, counted operation by operation: what CPUs do not count."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations make while it is entered; those that were there before count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_flatten((args, kwargs))[0]:
            self._meet(x, 0)
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            self._meet(x, 1)
        return out

    def _meet(self, x: Any, counts: int) -> None:
        if not isinstance(x, Tensor) or x.device.type not in ("cpu", "meta"):
            return
        storage = x.untyped_storage()
        if storage._cdata in self.known:
            return
        size, key = counts * storage.nbytes(), storage._cdata
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._lose, key, size)

    def _lose(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak_of(run: Any) -> int:
    """The most bytes alive at a time of what `run` makes."""
    with LiveBytes() as live, torch.no_grad():
        run()
    return live.peak
