"""Where the random numbers of drafted tokens live."""

from collections.abc import Sequence as Sized
from typing import Any

import numpy as np
import torch

from dlm.diffusion.choose import Address
from dlm.inference.drafting.drafter import Wish


def addresses(wishes: Sized[Wish], device: torch.device) -> Address:
    """Where the random numbers of the wished tokens live: the target's own addresses."""
    facts: list[list[Any]] = [[], [], [], []]
    for wish in wishes:
        seq = wish.sequence
        position = wish.anchor + 1 + np.arange(wish.count)
        step = seq.strategy.luck(seq, position)
        for column, values in zip(facts, (seq.request.seed, seq.request.sample, step, position), strict=True):
            column.append(np.broadcast_to(values, wish.count))
    seed, sample, step, position = (torch.from_numpy(np.concatenate(column)).to(device) for column in facts)
    return Address(seed=seed, sample=sample, step=step, position=position)
