"""The canvases of all plain requests side by side, so that what a step commits of them is written down at once.

Each of these canvases reads and writes its own part of the arrays here; `Sequence.plain` says whose these are.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dlm.inference.crowd import Grid
    from dlm.inference.sequence import Sequence


class Commits(NamedTuple):
    """What a step commits of some canvases, of each the columns of its one open block: (requests, columns)."""

    seqs: "list[Sequence]"
    steps: np.ndarray
    """The step that each has come to, (requests,)."""
    grid: "Grid"
    """Where the columns are."""
    masks: np.ndarray
    """Which are masked before the step; False behind a block's end."""
    token: np.ndarray
    commit: np.ndarray
    clean: np.ndarray
    """Exact cache: positions under this one have their final keys then, (requests,)."""


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

    def write(self, commits: Commits) -> "tuple[list[Sequence], list[tuple[Sequence, int]]]":
        """Write down a step of requests, and let those whose blocks have no masks left close them.

        Returns those with more keys that are final, and those with something to tell, more text or a block's end: all
        their positions before the number beside them are settled now.
        """
        seqs, masks, commit = commits.seqs, commits.masks, commits.commit
        rows, columns = commit.nonzero()
        where = commits.grid.where[rows, columns]
        self.tokens[where] = commits.token[rows, columns]
        self.masked[where] = False
        self.when[where] = commits.steps[rows]
        left = masks & ~commit
        first_left = left.argmax(1)
        closed, further = ~left.any(1), first_left != masks.argmax(1)
        settled_to = np.where(closed, commits.grid.end, commits.grid.first + first_left)
        cleaner = commits.clean > [seq.pages.booked for seq in seqs]
        settled = [seqs[i] for i in np.flatnonzero(cleaner).tolist()]
        for seq, clean in zip(settled, commits.clean[cleaner].tolist(), strict=True):
            seq.pages.clean = max(seq.pages.clean, clean)
        for seq in seqs:
            seq.go_on()
        for i in np.flatnonzero(closed).tolist():
            seqs[i].close_plainly()
        news = np.flatnonzero(closed | further)
        return settled, [(seqs[i], end) for i, end in zip(news.tolist(), settled_to[news].tolist(), strict=True)]

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
