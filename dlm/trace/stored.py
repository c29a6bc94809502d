"""What a database knows of traces: rows to list, records to read, entries to store. Opens none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dlm.trace.facts import Facts

if TYPE_CHECKING:
    import zstandard


class Row(NamedTuple):
    """What the store knows of a trace without opening it."""

    request_id: str
    at: int
    """Ticks of 0.1 ms since 1970 at which it was stored."""
    context: int
    size: int
    """Bytes of its record."""


class Stored(NamedTuple):
    """A record and all it takes to read it, as they stood at one moment."""

    request_id: str
    at: int
    record: bytes
    facts: Facts
    """Its context."""
    dictionary: zstandard.ZstdCompressionDict | None
    damage: str = ""
    """Why it cannot be read; empty where nothing is known against it."""


class Entry(NamedTuple):
    """A record to be inserted."""

    request_id: str
    facts: bytes
    """The context's JSON."""
    record: bytes
    overwrite: bool = False


class Change(NamedTuple):
    """A record to stand where another one was read."""

    old: Stored
    facts: bytes
    record: bytes
