"""Reads the headers of GGUF files, llama.cpp's format: settings, vocabulary, and where the weights are.

The `gguf` package has a reader too, but it takes seconds for a vocabulary of 50,000 tokens and trusts the file's
counts. That package is used only to unpack weights.
"""

import mmap
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dlm.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a value type -> `struct`'s letter for it."""
STRING, LIST = 8, 9
LENGTH = struct.Struct("<Q")
"""The length that precedes each string."""
MOST_TENSORS, MOST_KEYS, MOST_DIMENSIONS, MOST_NAME = 100_000, 10_000, 4, 1_000


@dataclass(frozen=True)
class Values:
    """The place of a list in the header; `Header.list` reads it."""

    kind: int
    count: int
    start: int


@dataclass(frozen=True)
class Packed:
    """A tensor as declared: `shape` in torch's order, GGUF's number of its packing, its offset in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file."""

    file: Path
    values: Mapping[str, Any]
    """Single values by key; `Values` for lists."""
    tensors: Mapping[str, Packed]
    content: bytes
    """The file up to the weights, which lists are read from."""
    size: int
    """Bytes of the whole file."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file holds a vocabulary."""
        return self.text("tokenizer.ggml.model", "no_vocab") not in ("no_vocab", "none")

    def get(self, key: str, default: Any = None) -> Any:
        """A single value; `default` where the key is not there."""
        value = self.values.get(key, default)
        if isinstance(value, Values):
            raise UserError(f"{self.file}: {key} is a list of {value.count:,}; one value is expected")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A text; `default` where the key is not there."""
        value = self.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number from 0 up; `default` where the key is not there."""
        value = self.get(key, default)
        if value is not None and (type(value) is not int or value < 0):
            raise self.wrong(key, "a whole number from 0 up")
        return value

    def list(self, key: str) -> list[Any]:
        """The entries of a list; empty where the key is not there."""
        found = self.values.get(key)
        if found is None:
            return []
        if not isinstance(found, Values):
            raise self.wrong(key, "a list")
        if found.kind == STRING:
            return _Cursor(self.file, self.content, found.start).texts(found.count)
        return list(struct.unpack_from(f"<{found.count}{FORMATS[found.kind]}", self.content, found.start))

    def wrong(self, key: str, expected: str) -> UserError:
        """The error for a value of another kind than `expected`."""
        return UserError(f"{self.file}: {key} = {reprlib.repr(self.values.get(key))} should be {expected}")


def is_gguf(path: Path) -> bool:
    """Whether the path is a GGUF file, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """The file's header. Raises UserError where it is damaged or of an unknown version."""
    try:
        stat = path.stat()
        return _read_header(path, stat.st_size, stat.st_mtime_ns)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


@lru_cache(maxsize=2)  # a model asks for its settings, its tokenizer and its weights one after the other
def _read_header(path: Path, size: int, changed: int) -> Header:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:4] != MAGIC:
            raise UserError(f"{path} is no GGUF file: it begins with {bytes(content[:4])!r}, not {MAGIC!r}")
        cursor = _Cursor(path, content, 4)
        version = cursor.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "has its bytes in big-endian order" if swapped else f"is GGUF of version {version}"
            raise UserError(f"{path} {what}; versions 2 and 3 in little-endian order are read: convert the model again")
        tensors, keys = cursor.count("tensors", MOST_TENSORS), cursor.count("keys", MOST_KEYS)
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = cursor.text(MOST_NAME)
            if key in values:
                raise UserError(f"{path} has the key {key[:60]!r} twice")
            values[key] = cursor.value()
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment % 8:
            raise UserError(f"{path}: general.alignment = {alignment!r:.40} should be a multiple of 8")
        declared: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = cursor.text(MOST_NAME)
            if name in declared:
                raise UserError(f"{path} has a tensor {name[:60]!r} twice")
            declared[name] = cursor.tensor(name)
        start = -(-cursor.at // alignment) * alignment
        found = {name: Packed(shape, kind, start + offset) for name, (shape, kind, offset) in declared.items()}
        return Header(path, values, found, content[: cursor.at], size)


class _Cursor:
    """Reads one value after another; a length that leads outside the file is a UserError that names the byte."""

    def __init__(self, path: Path, content: Any, at: int) -> None:
        self.path, self.content, self.at = path, content, at

    def number(self, letter: str) -> Any:
        size = struct.calcsize(f"<{letter}")
        self._require(size)
        (value,) = struct.unpack_from(f"<{letter}", self.content, self.at)
        self.at += size
        return value

    def count(self, what: str, most: int) -> int:
        value = self.number("Q")
        if value > most:
            raise UserError(f"{self.path} claims {value:,} {what}; at most {most:,} are read")
        return value

    def text(self, most: int | None = None) -> str:
        size = self.number("Q")
        if most is not None and size > most:
            raise UserError(f"{self.path} has a name of {size:,} bytes at byte {self.at:,}: it is damaged")
        self._require(size)
        raw = self.content[self.at : self.at + size]
        self.at += size
        return raw.decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        """The next `count` strings, of a list whose lengths were checked before."""
        found, at, content = [], self.at, self.content
        for _ in range(count):
            (size,) = LENGTH.unpack_from(content, at)
            found.append(content[at + 8 : at + 8 + size].decode("utf-8", "replace"))
            at += 8 + size
        self.at = at
        return found

    def skip_texts(self, count: int) -> None:
        at, content, end = self.at, self.content, len(self.content)
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + LENGTH.unpack_from(content, at)[0]
        else:
            if at <= end:
                self.at = at
                return
        self.at = end
        self._require(8)

    def value(self) -> Any:
        kind = self.number("I")
        if kind == STRING:
            return self.text()
        if kind != LIST:
            return self.number(self._letter(kind))
        kind, count = self.number("I"), self.number("Q")
        start = self.at
        if kind == STRING:
            self.skip_texts(count)
        else:
            size = struct.calcsize(f"<{self._letter(kind)}") * count
            self._require(size)
            self.at += size
        return Values(kind, count, start)

    def tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Shape in torch's order, packing, and place behind the header."""
        dimensions = self.number("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise UserError(f"{self.path}: tensor {name[:60]!r} has {dimensions:,} dimensions; 1 to 4 are read")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return shape, self.number("I"), self.number("Q")

    def _letter(self, kind: int) -> str:
        if kind not in FORMATS:
            raise UserError(f"{self.path} has a value of the unknown type {kind} at byte {self.at:,}: it is damaged")
        return FORMATS[kind]

    def _require(self, size: int) -> None:
        if self.at + size > len(self.content):
            raise UserError(
                f"{self.path} is cut off: its header goes on for {size:,} bytes at byte {self.at:,} of "
                f"{len(self.content):,}; download or copy it again"
            )
