"""Drafter `recorded`: what a trace says was drafted at each step, so that a run can be repeated without its draft."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sized
from typing import TYPE_CHECKING

import numpy as np

from dlm.inference.drafting.drafter import Guess, Plain, Wish

if TYPE_CHECKING:
    from dlm.inference.sequence import Sequence

MOST = 256


class Recorded(Plain):
    """The tokens of each step by its number; nothing after the last one."""

    most = MOST

    def __init__(self, tokens: Mapping[int, Iterable[int]], name: str) -> None:
        self.tokens, self.name = {step: np.array(list(row), np.int64) for step, row in tokens.items()}, name

    def ready(self, seq: "Sequence", anchor: int, most: int) -> int:
        return min(most, len(self.tokens.get(seq.step, ())))

    def propose(self, wishes: Sized[Wish]) -> list[Guess]:
        return [Guess(self.tokens[wish.sequence.step][: wish.count]) for wish in wishes]
