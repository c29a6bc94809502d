"""Drafter `ngram+…`: prompt lookup where the text repeats itself, another drafter where it does not."""

from collections.abc import Sequence as Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dlm.inference.drafting.drafter import Drafter, Guess, Wish
from dlm.inference.drafting.ngram import NGram

if TYPE_CHECKING:
    from dlm.inference.forward import Forward
    from dlm.inference.scheduler import Scheduled
    from dlm.inference.sequence import Sequence


class LookupFirst(NGram):
    """A repetition costs no forward and is kept for longer than a small draft's guesses; it is not everywhere."""

    def __init__(self, rest: Drafter) -> None:
        self.rest, self.name = rest, f"ngram+{rest.name}"
        self.most, self.taps, self.marks = max(NGram.most, rest.most), rest.taps, rest.marks

    def ready(self, seq: "Sequence", anchor: int, most: int) -> int:
        return super().ready(seq, anchor, min(most, NGram.most)) or self.rest.ready(
            seq, anchor, min(most, self.rest.most)
        )

    def propose(self, wishes: Sized[Wish]) -> list[Guess]:
        guesses = super().propose(wishes)
        left = [i for i, guess in enumerate(guesses) if not len(guess.tokens)]
        if left:
            asked = [replace(wishes[i], rows=min(wishes[i].rows, self.rest.most + 1)) for i in left]
            for i, guess in zip(left, self.rest.propose(asked), strict=True):
                guesses[i] = guess
        return guesses

    def absorb(self, scheduled: "Sized[Scheduled]", forward: "Forward") -> None:
        self.rest.absorb(scheduled, forward)

    def park(self, seq: "Sequence") -> Any:
        return self.rest.park(seq)

    def resume(self, seq: "Sequence", parked: Any) -> None:
        self.rest.resume(seq, parked)

    def forget(self, seq: "Sequence") -> None:
        self.rest.forget(seq)

    def reload(self) -> None:
        self.rest.reload()

    def close(self) -> None:
        self.rest.close()
