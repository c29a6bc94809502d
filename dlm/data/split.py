"""Decides by its hash whether a document is held out, so that neither split is empty."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import nextafter

from dlm.data.config import DataConfig
from dlm.data.corpus import SALT, hash_fraction

LONGEST_PIECE, SHORTEST_PIECE, PIECES = 2000, 20, 10
"""A text is cut into PIECES pieces, each of at most and at least so many characters."""


@dataclass(frozen=True)
class Split:
    """Which documents are held out: those whose hash, a number in [0, 1), is below `bound`.

    `bound` is `data.heldout_fraction`, unless that would put all documents into one split: then it is the nearest
    number that leaves one for the other split. A single document stays in the training split.
    """

    bound: float
    documents: int | None = None
    """The number of different documents, where there were so few that `bound` was moved."""
    named: bool = False
    """Whether the config names the held-out files or split, so that hashes decide nothing."""

    @classmethod
    def of(cls, config: DataConfig, documents: Iterable[tuple[str, str]], most: int | None = None) -> "Split":
        """The split of documents given as (key, text), which are read until both splits have one.

        An endless corpus is read up to `most` documents; `bound` is then `data.heldout_fraction`.
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
        # Few documents are split by their text alone: two rows with the same text must not be in both splits.
        held_out = hash_fraction(key if self.documents is None else text, SALT) < self.bound
        return self.named or held_out == (split == "heldout")


def cut(texts: Iterable[str]) -> Iterator[list[str]]:
    """Each text as pieces of about equal size, which end with a paragraph, a line or a word; joined, they are the text."""
    texts = list(texts)
    size = min(LONGEST_PIECE, max(SHORTEST_PIECE, sum(map(len, texts)) // PIECES))
    for text in texts:
        pieces, start = [], 0
        while len(text) - start > size + size // 2:  # a short rest stays with the last piece
            end = start + size
            ends = (text.rfind(mark, start + size // 2, end) + len(mark) for mark in ("\n\n", "\n", " "))
            end = next((e for e in ends if e > start + size // 2), end)
            pieces.append(text[start:end])
            start = end
        yield [*pieces, text[start:]]
