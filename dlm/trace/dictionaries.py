"""zstd dictionaries of a store: which one to write with, which one a record needs, how one is trained. Knows no store."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard

from dlm.errors import UserError
from dlm.trace.codec import WHOLE, content
from dlm.trace.database import Database
from dlm.trace.trace import Trace

FEWEST = 100  # traces to learn from
SIZE = 2**16  # bytes of a dictionary


class Dictionaries:
    """A store's dictionaries, each read once. `chosen` is one to write with: its bytes, False for none, None for the newest."""

    def __init__(self, chosen: bytes | bool | None = None) -> None:
        self.chosen = chosen
        self.known: dict[int, zstandard.ZstdCompressionDict] = {}

    def get(self, database: Database, number: int) -> zstandard.ZstdCompressionDict:
        """The dictionary a record names; LookupError where the store has none, or a damaged one."""
        if number not in self.known:
            self.known[number] = database.dictionary(number)
        return self.known[number]

    def to_write_with(self, database: Database) -> zstandard.ZstdCompressionDict | None:
        """The dictionary for new records, if any."""
        if self.chosen is False:
            return None
        if isinstance(self.chosen, bytes):
            return self.get(database, add(database, self.chosen))
        newest = database.query("SELECT dictionary FROM dictionaries ORDER BY rowid DESC LIMIT 1")
        return self.get(database, newest[0][0]) if newest else None


def add(database: Database, data: bytes) -> int:
    """Keep a dictionary in the store under the number it bears."""
    dictionary = zstandard.ZstdCompressionDict(data)
    if dictionary.dict_id() == 0:
        raise UserError("dictionary: these bytes are no trained zstd dictionary (dlm-trace train-dict makes one)")
    return database.add_dictionary(dictionary)


def trained(traces: Iterable[Trace], number: int, size: int = SIZE) -> bytes:
    """A dictionary of what these traces share: words, headers."""
    contents: list[Any] = [content(trace, WHOLE) for trace in traces]
    if len(contents) < FEWEST:
        raise UserError(f"{len(contents)} traces are too few to learn a dictionary from: it needs {FEWEST} or more")
    size = min(size, sum(map(len, contents)) // 10)
    try:
        return zstandard.train_dictionary(size, contents, dict_id=number).as_bytes()
    except zstandard.ZstdError as error:
        raise UserError(f"no dictionary can be learnt from these {len(contents)} traces: {error}") from None


def given(dictionary: bytes | str | Path | bool | None) -> bytes | bool | None:
    """What a store is told of its dictionary, a file read."""
    if not isinstance(dictionary, str | Path):
        return dictionary
    try:
        return Path(dictionary).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{str(dictionary)[:80]}: the dictionary cannot be read: {why}") from None
