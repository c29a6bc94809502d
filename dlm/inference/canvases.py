"""The canvases of all plain requests side by side, so that what a step commits of them is written down at once.

Each of these canvases reads and writes its own part of the arrays here; `Sequence.plain` says whose these are.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dlm.inference.canvas import Decision

if TYPE_CHECKING:
    from dlm.inference.sequence import Sequence


class Commits(NamedTuple):
    """What a step commits of some canvases, of each the columns of its one open block: (requests, columns)."""

    seqs: "list[Sequence]"
    first: np.ndarray
    """The first column of each, (requests,)."""
    end: np.ndarray
    """One past its last."""
    where: np.ndarray
    """The columns' places in `Canvases`."""
    masks: np.ndarray
    """Which are masked before the step; False behind an end."""
    token: np.ndarray
    commit: np.ndarray
    clean: np.ndarray
    """Exact cache: positions under this one have their final keys then, (requests,)."""

    def of(self, number: int) -> Decision:
        """Those of one request."""
        width = int(self.end[number] - self.first[number])
        return Decision(self.token[number, :width], self.commit[number, :width])


class Canvases:
    """Arrays that canvases have in common: one behind the other in `tokens`, `masked` and `when`, a row each in `opened`."""

    def __init__(self) -> None:
        self.version = 0
        """Counts how often canvases got other places than they had."""
        self.places: dict[Sequence, int] = {}
        """The number of each canvas."""
        self._renew(0)

    def add(self, seq: "Sequence") -> None:
        """Take a request's canvas in."""
        if not self._free or self._used + seq.capacity > len(self.tokens):
            self._renew(seq.capacity)
        self._put(seq)

    def remove(self, seq: "Sequence") -> None:
        """Let a canvas have its own arrays again, where it was one of these."""
        place = self.places.pop(seq, None)
        if place is not None:
            canvas = seq.canvas
            tokens, masked, when = (np.empty_like(x) for x in (canvas.tokens, canvas.masked, canvas.when))
            canvas.move(tokens, masked, when, np.empty_like(canvas.opened))
            self._free.append(place)

    def clear(self) -> None:
        """Let all canvases have their own arrays again."""
        for seq in list(self.places):
            self.remove(seq)
        self._renew(0)

    def write(self, commits: Commits) -> "tuple[list[Sequence], list[Sequence]]":
        """Write down a step of requests, and let those whose blocks have no masks left close them.

        Returns those with more keys that are final, and those with something to tell: more text, or a block's end.
        """
        seqs, masks, where = commits.seqs, commits.masks, commits.where[commits.commit]
        self.tokens[where] = commits.token[commits.commit]
        self.masked[where] = False
        self.when[where] = np.repeat([seq.step for seq in seqs], commits.commit.sum(1))
        left = masks & ~commits.commit
        closed, further = ~left.any(1), left.argmax(1) != masks.argmax(1)
        cleaner = commits.clean > [seq.pages.booked for seq in seqs]
        settled = [seqs[i] for i in np.flatnonzero(cleaner).tolist()]
        for seq, clean in zip(settled, commits.clean[cleaner].tolist(), strict=True):
            seq.pages.clean = max(seq.pages.clean, clean)
        for seq in seqs:
            seq.go_on()
        for i in np.flatnonzero(closed).tolist():
            seqs[i].canvas.open[0].closed = True
            seqs[i].advance(commits.of(i))
        return settled, [seqs[i] for i in np.flatnonzero(closed | further).tolist()]

    def _renew(self, more: int) -> None:
        """Larger arrays, without what ended requests left behind."""
        seqs, self.places = list(self.places), {}
        size, count = 2 * (sum(seq.capacity for seq in seqs) + more) + 1, 2 * (len(seqs) + 1)
        self.tokens, self.masked, self.when = np.zeros(size, np.int64), np.zeros(size, bool), np.zeros(size, np.int64)
        self.opened, self.offsets = np.zeros((count, 4), np.int64), np.zeros(count, np.int64)
        self._used, self._free = 0, list(range(count))
        self.version += 1
        for seq in seqs:
            self._put(seq)

    def _put(self, seq: "Sequence") -> None:
        place, start, end = self._free.pop(), self._used, self._used + seq.capacity
        self.places[seq], self.offsets[place], self._used = place, start, end
        tokens, masked, when = (x[start:end] for x in (self.tokens, self.masked, self.when))
        seq.canvas.move(tokens, masked, when, self.opened[place])
