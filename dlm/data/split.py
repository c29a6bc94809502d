"""Which side of the split a document is on: its hash decides, and neither side stays empty."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import nextafter

from dlm.data.config import DataConfig
from dlm.data.corpus import SALT, hash_fraction

LONGEST_PIECE, SHORTEST_PIECE, PIECES = 2000, 20, 10
"""Characters of a piece of a text, at most and at least; between the two there are so many pieces."""


@dataclass(frozen=True)
class Split:
    """Which documents are held out: those whose hash, a number in [0, 1), is below `bound`.

    `bound` is `data.heldout_fraction`, unless that would put all documents on one side: then it is the nearest number
    that leaves one on the other, and `documents` says of how many. A single document stays in the training split.
    """

    bound: float
    documents: int | None = None
    """How many different documents there are, where their number decided `bound`."""
    named: bool = False
    """The config names the held-out files or split: then every document belongs to what is read."""

    @classmethod
    def of(cls, config: DataConfig, documents: Iterable[tuple[str, str]], most: int | None = None) -> "Split":
        """The split of documents given as (key, text), read until both sides have one.

        `most` stops the reading of an endless corpus, where the key's hash then decides alone.
        """
        fraction = config.heldout_fraction
        if config.heldout_paths or config.heldout_split:
            return cls(fraction, named=True)
        if fraction == 0:
            return cls(fraction)
        sides: set[bool] = set()
        hashes: set[float] = set()
        for number, (key, text) in enumerate(islice(documents, most), start=1):
            sides.add(hash_fraction(key, SALT) < fraction)
            hashes.add(hash_fraction(text, SALT))
            if len(sides) == 2 or number == most:
                return cls(fraction)
        if len(hashes) < 2:
            return cls(0.0, len(hashes))
        return cls(max(hashes) if True in sides else nextafter(min(hashes), 1.0), len(hashes))

    def takes(self, key: str, text: str, split: str) -> bool:
        """Whether the document belongs to `split`, train or heldout."""
        # Few documents are told apart by their text alone: two rows with one text must not be on both sides.
        held_out = hash_fraction(key if self.documents is None else text, SALT) < self.bound
        return self.named or held_out == (split == "heldout")


def cut(texts: Iterable[str]) -> Iterator[list[str]]:
    """Each text as pieces of about equal size, which end with a paragraph, a line or a word; joined, they are the text."""
    texts = list(texts)
    size = min(LONGEST_PIECE, max(SHORTEST_PIECE, sum(map(len, texts)) // PIECES))
    for text in texts:
        pieces, start = [], 0
        while len(text) - start > size + size // 2:  # what is left over is no piece of its own
            end = start + size
            ends = (text.rfind(mark, start + size // 2, end) + len(mark) for mark in ("\n\n", "\n", " "))
            end = next((e for e in ends if e > start + size // 2), end)
            pieces.append(text[start:end])
            start = end
        yield [*pieces, text[start:]]
