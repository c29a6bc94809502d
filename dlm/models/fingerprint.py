"""Which weights these are: a digest that traces carry and re-runs compare."""

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dlm.models.transformer import Transformer

WHOLE = 2**28
"""Bytes up to which every weight counts; of more, so many evenly spaced elements of each tensor do."""
SAMPLED = 2**16

_known: "WeakKeyDictionary[Transformer, tuple[tuple, str]]" = WeakKeyDictionary()


def weights_digest(network: Transformer) -> str:
    """Hex digest of names, shapes, dtypes and values; ends in "~" where a large network's values were sampled.

    Taken once, and again only when a weight was replaced or written to.
    """
    state = tuple((p.data_ptr(), p._version) for p in network.parameters())
    known = _known.get(network)
    if known is None or known[0] != state:
        _known[network] = known = state, _digest(network)
    return known[1]


def _digest(network: Transformer) -> str:
    parameters = sorted(network.named_parameters())
    sampled = sum(p.numel() * p.element_size() for _, p in parameters) > WHOLE
    told = blake2b(digest_size=16)
    for name, parameter in parameters:
        told.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        told.update(_values(parameter.detach(), sampled))
    return told.hexdigest() + "~" * sampled


def _values(weight: Tensor, sampled: bool) -> bytes:
    if sampled and weight.numel() > SAMPLED:
        index = torch.linspace(0, weight.numel() - 1, SAMPLED, device=weight.device, dtype=torch.float64).long()
        rows, columns = index // weight.shape[-1], index % weight.shape[-1]
        weight = weight.flatten(0, -2)[rows, columns] if weight.ndim > 1 else weight[index]
    return weight.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def files_digest(files: Iterable[Path]) -> str:
    """Hex digest of weights that lie in files, without loading them; of a large file, evenly spaced pieces count."""
    told = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        told.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as handle:
            for start in range(0, size, max(SAMPLED, size * SAMPLED // WHOLE)):
                handle.seek(start)
                told.update(handle.read(SAMPLED))
    return told.hexdigest()
