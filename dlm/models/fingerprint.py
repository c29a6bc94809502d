"""Tells whether weights changed, and computes the digest of weights that traces store."""

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dlm.models.transformer import Transformer
from dlm.models.weight_only import parts

WHOLE = 2**28
"""Up to so many bytes, the digest covers every weight; of larger networks, evenly spaced elements of each tensor."""
SAMPLED = 2**16
PROBED = 16
"""Values of each weight that `weights_state` holds."""
_known: "WeakKeyDictionary[Transformer, tuple[tuple, str]]" = WeakKeyDictionary()


def weights_state(network: Transformer) -> tuple:
    """Equal to an earlier one while the weights are the same: `dlm.Engine`, the copies for C and digests rely on it.

    It holds each weight's memory, torch's count of writes to it and its first values, since neither a fused optimiser
    nor a write through `.data` is counted. A write through `.data` that leaves the first values alone is not seen.
    """
    tensors = [part for x in (*network.parameters(), *network.buffers()) for part in parts(x)]
    places = [
        (StorageWeakRef(x.untyped_storage()), x.storage_offset(), x.stride(), 0 if x.is_inference() else x._version)
        for x in tensors
    ]
    by_device: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        first = x.data.as_strided((min(PROBED, x.numel()),), (1,))
        by_device.setdefault(x.device, []).append(first.view(torch.uint8))
    return places, [torch.cat(each).cpu().numpy().tobytes() for each in by_device.values()]


def weights_digest(network: Transformer) -> str:
    """Hex digest of names, shapes, dtypes and values; ends in "~" where a large network's values were sampled.

    Taken once, and again when `weights_state` is another one.
    """
    state, known = weights_state(network), _known.get(network)
    if known is None or known[0] != state:
        _known[network] = known = state, _digest(network)
    return known[1]


def forget(network: Transformer) -> None:
    """Forget the digest: the next use computes it again."""
    _known.pop(network, None)


def _digest(network: Transformer) -> str:
    parameters = sorted(network.named_parameters())
    sampled = sum(p.numel() * p.element_size() for _, p in parameters) > WHOLE
    digest = blake2b(digest_size=16)
    for name, parameter in parameters:
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        for part in parts(parameter.detach()):
            digest.update(_values(part, sampled))
    return digest.hexdigest() + "~" * sampled


def _values(weight: Tensor, sampled: bool) -> bytes:
    if sampled and weight.numel() > SAMPLED:
        index = torch.linspace(0, weight.numel() - 1, SAMPLED, device=weight.device, dtype=torch.float64).long()
        rows, columns = index // weight.shape[-1], index % weight.shape[-1]
        weight = weight.flatten(0, -2)[rows, columns] if weight.ndim > 1 else weight[index]
    return weight.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def files_digest(files: Iterable[Path]) -> str:
    """Hex digest of weights that lie in files, without loading them; of a large file, evenly spaced pieces count."""
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as handle:
            for start in range(0, size, max(SAMPLED, size * SAMPLED // WHOLE)):
                handle.seek(start)
                digest.update(handle.read(SAMPLED))
    return digest.hexdigest()
