"""How many pages the key-value pool has: as given, or what free memory holds."""

import os

import torch

from dlm.errors import UserError
from dlm.inference.config import EngineConfig
from dlm.models.lm import LM

SHARE_ON_HOST = 0.25
"""Of `memory_fraction`: a CPU's memory is everybody's."""


def page_count(lm: LM, config: EngineConfig, beside: int = 0) -> int:
    """`num_pages`, or as many as `memory_fraction` of the free memory holds and `max_num_requests` could ever use.

    `beside` are bytes that a page takes elsewhere: a draft's.
    """
    each = page_bytes(lm, config.page_size) + beside
    if config.num_pages is not None:
        if config.num_pages * each > (most := whole_memory(lm.device)):
            raise UserError(
                f"{config.num_pages} pages of {config.page_size} positions take {config.num_pages * each / 2**30:,.1f} GiB, "
                f"and {lm.device} has {most / 2**30:,.1f} GiB in all: shorten the requests, or have fewer at a time "
                "(batch_size, num_pages)"
            )
        return config.num_pages
    free = free_memory(lm.device) * config.memory_fraction
    if lm.device.type == "cpu":
        free *= SHARE_ON_HOST
    if lm.network.group is not None:  # every process must schedule alike
        least = torch.tensor(free, dtype=torch.float64, device=lm.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, lm.network.group)
        free = least.item()
    useful = config.max_num_requests * 2 * -(-lm.config.context_length // config.page_size)
    pages = min(int(free // each), useful)
    if pages < 1:
        raise UserError(
            f"memory_fraction = {config.memory_fraction} of the free memory is {free / 2**20:.1f} MiB, and one page of "
            f"{config.page_size} positions takes {each / 2**20:.1f} MiB: raise it, or make page_size smaller"
        )
    return pages


def page_bytes(lm: LM, page_size: int) -> int:
    """Bytes of one page: keys and values of every layer."""
    c = lm.config
    return 2 * c.num_hidden_layers * page_size * lm.network.kv_heads * c.head_dim * lm.dtype.itemsize


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
