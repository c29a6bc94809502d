"""Where the random numbers of drafted tokens live."""

from collections.abc import Mapping
from collections.abc import Sequence as Sized

import numpy as np
from torch import Tensor

from dlm.diffusion.choose import Address
from dlm.inference.drafting.drafter import Wish

PARTS = ("seed", "sample", "step", "position")


def addresses(wishes: Sized[Wish]) -> dict[str, np.ndarray]:
    """Where the random numbers of the wished tokens live, (n,) each: the target's own addresses."""
    facts: list[list[np.ndarray]] = [[], [], [], []]
    for wish in wishes:
        seq = wish.sequence
        position = wish.anchor + 1 + np.arange(wish.count)
        step = seq.strategy.luck(seq, position)
        for column, values in zip(facts, (seq.request.seed, seq.request.sample, step, position), strict=True):
            column.append(np.broadcast_to(values, wish.count))
    return {name: np.concatenate(column) for name, column in zip(PARTS, facts, strict=True)}


def address_of(x: Mapping[str, Tensor]) -> Address:
    """`addresses` that were sent to a device."""
    return Address(**{name: x[name] for name in PARTS})
