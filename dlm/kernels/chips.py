"""GPUs as launches see them, and the tiles of attention that fit each."""

from dataclasses import dataclass
from functools import cache

import torch
import triton

from dlm.errors import UserError


@dataclass(frozen=True)
class Chip:
    """What a launch has to know of the GPU."""

    multiprocessors: int
    shared_memory: int
    """Bytes a program may have."""
    generation: int
    """CUDA compute capability's major number; 0 elsewhere."""

    @classmethod
    @cache
    def of(cls, device: torch.device) -> "Chip":
        if device.type != "cuda":  # Triton's interpreter
            return cls(1, 65536, 0)
        facts = torch.cuda.get_device_properties(device)
        shared = getattr(facts, "shared_memory_per_block_optin", 0) or facts.shared_memory_per_block
        return cls(facts.multi_processor_count, shared, 0 if torch.version.hip else facts.major)


@dataclass(frozen=True)
class Tile:
    """What a program holds at once: rows (queries × heads of a group) and keys."""

    rows: int
    keys: int
    warps: int


TILES = {  # (head size up to, bytes of an element): small enough for every chip's registers, wide enough for its tensor cores
    (64, 2): Tile(64, 64, 4),
    (128, 2): Tile(64, 64, 4),
    (256, 2): Tile(64, 32, 8),
    (64, 4): Tile(32, 32, 4),
    (128, 4): Tile(32, 16, 8),
    (256, 4): Tile(32, 16, 8),
}
MORE_WARPS = {(128, 2): Tile(64, 64, 8)}
"""Blackwell's accumulators live in tensor memory, and more warps have room to scale them; where there are no products of
warp groups, four warps have too few registers."""


def tile_of(head_dim: int, itemsize: int, chip: Chip) -> Tile:
    """The tile of a head size on a chip: never of the batch, or results would follow it."""
    tiles = {**TILES, **MORE_WARPS} if chip.generation in (8, 10, 12) else TILES
    fitting = [tile for (size, width), tile in tiles.items() if head_dim <= size and width == itemsize]
    if not fitting:
        raise UserError(
            f"no attention kernel for heads of {head_dim} channels of {itemsize} bytes: they go up to 256 channels, in "
            "float16, bfloat16 or float32"
        )
    return fitting[0]


def stages_of(tile: Tile, head_dim: int, itemsize: int, chip: Chip) -> int:
    """Triton's `num_stages`: three key tiles in shared memory where two programs still fit beside each other, else two.

    The page table is a pipelined load of its own, before the keys', so b tiles take 2 b - 1 stages. Results do not change.
    """
    row = triton.next_power_of_2(head_dim) * itemsize
    return 5 if 2 * (tile.rows + 3 * 2 * tile.keys) * row < chip.shared_memory else 3
