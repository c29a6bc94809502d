"""zstd dictionaries of a store: which one to write with, how one is trained and numbered."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import zstandard

from dlm.errors import UserError
from dlm.trace.codec import WHOLE, content
from dlm.trace.database import Database
from dlm.trace.numbers import next_dictionary
from dlm.trace.trace import Trace

FEWEST = 100  # traces to learn from
SIZE = 2**16  # bytes of a dictionary


class NoDictionary(UserError):
    """There is too little to learn a dictionary from."""


class Dictionaries:
    """What a store writes with: `chosen` is a dictionary's bytes, False for none, None for the store's newest."""

    def __init__(self, chosen: bytes | bool | None = None) -> None:
        self.chosen = chosen

    @cached_property
    def own(self) -> zstandard.ZstdCompressionDict | None:
        """The one that was given. Raises UserError where its bytes are no dictionary."""
        return parsed(self.chosen) if isinstance(self.chosen, bytes) else None

    def to_write_with(self, database: Database) -> zstandard.ZstdCompressionDict | None:
        """The dictionary for new records, if any. A damaged one is none: it would take the records with it."""
        if self.own is not None:
            database.add_dictionary(self.own)
            return self.own
        return database.read(lambda: _newest(database)) if self.chosen is None else None


def _newest(database: Database) -> zstandard.ZstdCompressionDict | None:
    number = database.query("SELECT max(dictionary) FROM dictionaries")[0][0]
    try:
        return None if number is None else database.dictionary(number)
    except LookupError:
        return None


def parsed(data: bytes) -> zstandard.ZstdCompressionDict:
    """A dictionary of bytes that someone gave."""
    dictionary = zstandard.ZstdCompressionDict(data)
    if dictionary.dict_id() == 0:
        raise UserError("dictionary: these bytes are no trained zstd dictionary (dlm-trace train-dict makes one)")
    return dictionary


def add_new(database: Database, data: bytes) -> int:
    """Keep a trained dictionary under a number that no other one of this store ever had; returns it.

    To be called in a transaction. The number stands after the four bytes that zstd's dictionaries begin with.
    """
    number = next_dictionary(database.sql)
    database.insert((), zstandard.ZstdCompressionDict(data[:4] + number.to_bytes(4, "little") + data[8:]), keep=True)
    return number


def trained(traces: Iterable[Trace], number: int, size: int = SIZE) -> bytes:
    """A dictionary of what these traces share: words, headers."""
    contents: list[Any] = [content(trace, WHOLE) for trace in traces]
    if len(contents) < FEWEST:
        raise NoDictionary(f"{len(contents)} traces are too few to learn a dictionary from: it needs {FEWEST} or more")
    size = min(size, sum(map(len, contents)) // 10)
    try:
        return zstandard.train_dictionary(size, contents, dict_id=number).as_bytes()
    except zstandard.ZstdError as error:
        raise NoDictionary(f"no dictionary can be learnt from these {len(contents)} traces: {error}") from None


def given(dictionary: bytes | str | Path | bool | None) -> bytes | bool | None:
    """The bytes of the dictionary that a store was given, read where it is a file."""
    if not isinstance(dictionary, str | Path):
        return dictionary
    try:
        return Path(dictionary).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{str(dictionary)[:80]}: the dictionary cannot be read: {why}") from None
