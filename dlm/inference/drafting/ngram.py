"""Drafter `ngram`: what followed the last time the same few tokens stood in the text (prompt lookup).

Saxena, "Prompt Lookup Decoding" (2023). Costs no forward; pays where the text repeats its prompt or itself.
"""

from collections.abc import Sequence as Sized
from typing import TYPE_CHECKING

import numpy as np

from dlm.inference.drafting.drafter import Guess, Plain, Wish

if TYPE_CHECKING:
    from dlm.inference.sequence import Sequence

LONGEST, SHORTEST = 4, 2
"""Tokens that must agree; the longest agreement wins, among equals the latest."""


class NGram(Plain):
    """Continues as the text itself did after the same tokens; guesses nothing where these never stood before."""

    name = "ngram"
    most = 15

    def ready(self, seq: "Sequence", anchor: int, most: int) -> int:
        return len(continuation(seq.canvas.tokens[: anchor + 1], min(most, self.most)))

    def propose(self, wishes: Sized[Wish]) -> list[Guess]:
        return [Guess(continuation(wish.sequence.canvas.tokens[: wish.anchor + 1], wish.count)) for wish in wishes]


def continuation(text: np.ndarray, most: int) -> np.ndarray:
    """Up to `most` tokens that followed an earlier occurrence of the text's last tokens; empty where there is none."""
    for size in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)  # each is followed by a token
        found = np.flatnonzero((windows == text[-size:]).all(-1))
        if len(found):
            start = int(found[-1]) + size
            return text[start : start + most].copy()
    return text[:0]
