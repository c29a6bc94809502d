"""Finds files that repeat others: copies of held-out files, and files with few new lines."""

import re
from collections import Counter
from hashlib import blake2b
from typing import Protocol

# Lines of at least so many characters are compared; shorter ones ("return None", "import os") occur everywhere.
TELLING_LINE = 24
# Files that share fewer lines than this are no copies: the lines are idioms ("if __name__ == ...").
COPIED_LINES = 10
# Files that share this many telling lines are compared by their shingles.
SUSPICIOUS_LINES = 3
# Tokens of a shingle, and the share of either file's shingles that makes two files near-duplicates.
SHINGLE, NEAR = 8, 0.3
_TOKEN = re.compile(r"\w+|[^\w\s]")


class Text(Protocol):
    """A file with its text."""

    @property
    def text(self) -> str: ...


class LeakGuard:
    """Tells whether a file is, or mostly repeats, a held-out one."""

    def __init__(self, held: list) -> None:
        self._contents = {content_of(f) for f in held}
        self._sizes = [len(telling_lines(f)) for f in held]
        self._shingles = [shingles(f) for f in held]
        self._holders: dict[str, list[int]] = {}
        for number, f in enumerate(held):
            for line in telling_lines(f):
                self._holders.setdefault(line, []).append(number)

    def leaks(self, file: Text) -> bool:
        """True for the same content, and for edited or embedded copies.

        Such a copy shares half of the telling lines of either file, or NEAR of the shingles of either.
        """
        if content_of(file) in self._contents:
            return True
        lines = telling_lines(file)
        shared = Counter(number for line in lines for number in self._holders.get(line, ()))
        if any(n >= COPIED_LINES and 2 * n >= min(len(lines), self._sizes[number]) for number, n in shared.items()):
            return True
        return self.likeness(file, shared) >= NEAR

    def likeness(self, file: Text, shared: Counter[int] | None = None) -> float:
        """The largest share of shingles in common with a held-out file, as a share of the smaller file's."""
        if shared is None:
            shared = Counter(number for line in telling_lines(file) for number in self._holders.get(line, ()))
        suspects = [number for number, n in shared.items() if n >= SUSPICIOUS_LINES]
        if not suspects:
            return 0.0
        own = shingles(file)
        smaller = ((number, min(len(own), len(self._shingles[number]))) for number in suspects)
        return max((len(own & self._shingles[number]) / size for number, size in smaller if size), default=0.0)


class Repeats:
    """Measures how much of a file is new, compared with the files added before."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def fresh(self, file: Text) -> float:
        """The share of the file's long lines that no file added before has; 1 for a file without long lines."""
        lines = self._lines(file)
        return len(lines - self._seen) / len(lines) if lines else 1.0

    def add(self, file: Text) -> None:
        """Count this file's lines as seen."""
        self._seen |= self._lines(file)

    @staticmethod
    def _lines(file: Text) -> set[int]:
        return {_hash(line) for line in telling_lines(file)}


def content_of(file: Text) -> bytes:
    """A digest that is equal for files that differ only in white space."""
    return blake2b("\n".join(file.text.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def telling_lines(file: Text) -> set[str]:
    """The file's long lines, without comments."""
    stripped = (line.strip() for line in file.text.splitlines())
    return {line for line in stripped if len(line) >= TELLING_LINE and not line.startswith("#")}


def shingles(file: Text) -> set[int]:
    """Hashes of all runs of SHINGLE tokens: words, numbers and signs."""
    tokens = _TOKEN.findall(file.text)
    return {_hash(" ".join(tokens[at : at + SHINGLE])) for at in range(len(tokens) - SHINGLE + 1)}


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
