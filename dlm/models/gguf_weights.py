"""The weights of a GGUF file, unpacked tensor by tensor through the `gguf` package."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from dlm.data.gguf import Packed, read_header
from dlm.errors import UserError
from dlm.models.hub_tensors import Names

NAMES: Names = {
    "embed": "token_embd",
    "layers.*.attn_norm": "blk.*.attn_norm",
    "layers.*.attn.q_proj": "blk.*.attn_q",
    "layers.*.attn.k_proj": "blk.*.attn_k",
    "layers.*.attn.v_proj": "blk.*.attn_v",
    "layers.*.attn.o_proj": "blk.*.attn_output",
    "layers.*.attn.q_norm": "blk.*.attn_q_norm",
    "layers.*.attn.k_norm": "blk.*.attn_k_norm",
    "layers.*.mlp_norm": "blk.*.ffn_norm",
    "layers.*.mlp.gate_proj": "blk.*.ffn_gate",
    "layers.*.mlp.up_proj": "blk.*.ffn_up",
    "layers.*.mlp.down_proj": "blk.*.ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
}
"""Our names of weights -> those that all architectures read here have."""
DIVISORS = "rope_freqs.weight"
"""The name of a tensor that is no weight: divisors of the rotary frequencies."""
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""The name of one of several files that a model was split into."""
CHUNK = 2**22
"""So many weights are unpacked at a time, which takes little memory beside the network's."""


class Weights:
    """A file's tensors by name, with the methods of a safetensors handle. UserError where the file is damaged.

    `heads` are tensors ("attn_q") whose rows are ordered for a rotation of neighbours, each with its number of heads.
    """

    def __init__(self, file: Path, device: torch.device, heads: Mapping[str, int] | None = None) -> None:
        self.header, self.device, self.package = read_header(file), device, _package(file)
        self.heads = heads or {}
        self.content = np.memmap(file, np.uint8, "r")

    def keys(self) -> list[str]:
        """The names of tensors that are weights."""
        return [name for name in self.header.tensors if name != DIVISORS]

    def get_slice(self, name: str) -> "Shape":
        """The tensor's declaration, checked against the size of the file."""
        self._bytes(name, self.header.tensors[name])
        return Shape(self.header.tensors[name].shape)

    def get_tensor(self, name: str) -> Tensor:
        """A tensor in fp32, its rows ordered for a rotation of halves."""
        tensor = self.header.tensors[name]
        rows = self._bytes(name, tensor)
        kind, columns = self.package.GGMLQuantizationType(tensor.kind), tensor.shape[-1]
        found = np.empty((len(rows), columns), np.float32)
        step = max(1, CHUNK // columns)
        for start in range(0, len(rows), step):
            found[start : start + step] = self.package.dequantize(rows[start : start + step], kind)
        return self._straight(name, torch.from_numpy(found.reshape(tensor.shape))).to(self.device)

    def _bytes(self, name: str, tensor: Packed) -> np.ndarray:
        """The packed rows of a tensor, (rows, bytes of a row)."""
        file, kinds = self.header.file, self.package.GGMLQuantizationType
        known = {kind.value: kind for kind in kinds}
        kind = known.get(tensor.kind)
        if kind is None or not _readable(self.package, kind):
            what = f"type {tensor.kind}" if kind is None else kind.name
            raise UserError(f"{file}: tensor {name!r} is stored as {what}, which the gguf package cannot unpack")
        block, size = self.package.GGML_QUANT_SIZES[kind]
        count, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        if not count or not columns or columns % block:
            raise UserError(f"{file}: tensor {name!r} has shape {tensor.shape}, and {kind.name} packs {block} in a row")
        width = columns // block * size
        end = tensor.start + count * width
        if end > self.header.size:
            raise UserError(
                f"{file} is cut off: tensor {name!r} ends at byte {end:,} of {self.header.size:,}; download or copy it again"
            )
        return self.content[tensor.start : end].reshape(count, width)

    def _straight(self, name: str, found: Tensor) -> Tensor:
        """The rows of each head, channels 0, n/2, 1, n/2 + 1, …, put back into the order 0, 1, …, n - 1."""
        heads = self.heads.get(name.split(".")[-2])
        if heads is None:
            return found
        if len(found) % (2 * heads):
            raise UserError(
                f"{self.header.file}: tensor {name!r} has {len(found)} rows, which {heads} heads cannot share"
            )
        pairs = found.reshape(heads, len(found) // heads // 2, 2, *found.shape[1:])
        return pairs.swapaxes(1, 2).reshape(found.shape)


class Shape:
    """The tensor's shape, and the dtype it is unpacked to."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"


def parts_of(path: Path) -> list[Path]:
    """The file, or all parts of a model that was split; `path` is then the first of them."""
    count = read_header(path).whole("split.count", 1) or 1
    if count == 1:
        return [path]
    named = PART.fullmatch(path.name)
    if named is None or int(named[2]) != 1 or int(named[3]) != count:
        raise UserError(
            f"{path} is one of {count:,} parts: give the first, whose name ends in -00001-of-{count:05}.gguf"
        )
    files = [path.with_name(f"{named[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, and {path.name} says there are {count:,} parts: download it too")
    return files


def first_part(path: Path) -> Path:
    """The file itself, or the first part of the model that it is a part of: that one says what the model is."""
    named = PART.fullmatch(path.name)
    if named is None or read_header(path).whole("split.count", 1) == 1:
        return path
    return path.with_name(f"{named[1]}-00001-of-{named[3]}.gguf")


def _package(file: Path) -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            f"{file}: weights in GGUF files are unpacked by gguf: pip install 'dlm[gguf]' ({error})"
        ) from error
    return gguf


def _readable(package: ModuleType, kind: int) -> bool:
    """Whether the package can unpack this kind; tried on zero rows."""
    block, size = package.GGML_QUANT_SIZES[kind]
    try:
        package.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
