"""What the traces of a store share, under numbers: zstd dictionaries and contexts.

A number is never given twice, since other processes may hold one for long. So the highest context number stays as an
empty row when no trace has it, and deleted dictionaries are listed in `retired`. Triggers make older versions of this
program keep to that; they and the list are created at the first deletion.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zstandard

from dlm.errors import UserError
from dlm.trace.codec import HEAD, WHOLE, content
from dlm.trace.database import Database
from dlm.trace.trace import Trace

if TYPE_CHECKING:
    from dlm.trace.store import TraceStore

FEWEST = 100  # traces to learn from
SIZE = 2**16  # bytes of a dictionary
NEWEST = 20_000  # traces a dictionary is learned from
PROOF = f"substr(record, 2, {HEAD - 1})"  # a record's digest, which does not depend on the dictionary
MOST = 2**31 - 1  # zstd's format reserves the numbers above
GONE = b""
"""In place of a digest: a context that was deleted."""
GUARDS = (
    "CREATE TABLE IF NOT EXISTS retired (dictionary INTEGER PRIMARY KEY, digest BLOB NOT NULL)",
    """CREATE TRIGGER IF NOT EXISTS contexts_keep_the_highest BEFORE DELETE ON contexts
    WHEN old.context = (SELECT max(context) FROM contexts) BEGIN SELECT RAISE(IGNORE); END""",
    """CREATE TRIGGER IF NOT EXISTS dictionaries_keep_their_numbers BEFORE INSERT ON dictionaries
    WHEN EXISTS (SELECT 1 FROM retired WHERE dictionary = new.dictionary AND digest <> new.digest)
    BEGIN SELECT RAISE(ABORT, 'another dictionary had this number'); END""",
)


class NoDictionary(UserError):
    """There is too little to learn a dictionary from."""


class Dictionaries:
    """Chooses the dictionary for new records: `chosen` is its bytes, False for none, None for the store's newest."""

    def __init__(self, chosen: bytes | bool | None = None) -> None:
        self.chosen = chosen

    @cached_property
    def own(self) -> zstandard.ZstdCompressionDict | None:
        """The one that was given. Raises UserError where its bytes are no dictionary."""
        return parsed(self.chosen) if isinstance(self.chosen, bytes) else None

    def to_write_with(self, database: Database) -> zstandard.ZstdCompressionDict | None:
        """The dictionary for new records, or None. A damaged one is not used: its records would be unreadable."""
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

    Call in a transaction. The number follows the first four bytes of a zstd dictionary.
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


def train_dict(store: TraceStore, size: int = SIZE, newest: int = NEWEST) -> int:
    """Learn a dictionary from the newest traces and write with it from now on; returns its number.

    If one of them was redacted or deleted meanwhile, it is learned again while nobody else can write.
    """
    store.flush()
    database = store.database
    learned, data = _lesson(store, size, newest)
    with database.transaction():
        proofs = dict(database.query(f"SELECT at, {PROOF} FROM traces WHERE at >= ?", min(learned)))
        if any(proofs.get(at) != proof for at, proof in learned.items()):
            _, data = _lesson(store, size, newest)
        return add_new(database, data)


def _lesson(store: TraceStore, size: int, newest: int) -> tuple[dict[int, bytes], bytes]:
    """The digests of the traces that were read, and the dictionary learned from them."""
    learned: dict[int, bytes] = {}

    def traces() -> Iterator[Trace]:
        for row in store.database.rows(newest=newest):
            stored = store.database.record(row.request_id)
            if stored is not None:
                learned[stored.at] = stored.record[1:HEAD]
                yield store.decoded(stored)

    return learned, trained(traces(), 1, size)


def given(dictionary: bytes | str | Path | bool | None) -> bytes | bool | None:
    """The bytes of the dictionary that a store was given, read where it is a file."""
    if not isinstance(dictionary, str | Path):
        return dictionary
    try:
        return Path(dictionary).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{str(dictionary)[:80]}: the dictionary cannot be read: {why}") from None


def drop_contexts(sql: sqlite3.Connection) -> None:
    """Delete the contexts that no trace has. To be called in a transaction."""
    unused = "context NOT IN (SELECT context FROM traces)"
    if sql.execute(f"SELECT 1 FROM contexts WHERE {unused} AND digest <> ? LIMIT 1", (GONE,)).fetchone() is None:
        return
    sql.execute(GUARDS[1])
    highest = sql.execute("SELECT max(context) FROM contexts").fetchone()[0]
    sql.execute(f"DELETE FROM contexts WHERE {unused} AND context < ?", (highest,))
    sql.execute(f"UPDATE contexts SET digest = ?, facts = x'' WHERE {unused} AND context = ?", (GONE, highest))


def drop_dictionaries(sql: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Delete these dictionaries, and note that their numbers are taken. To be called in a transaction."""
    for number in numbers:
        for guard in GUARDS:
            sql.execute(guard)
        sql.execute(
            "INSERT INTO retired SELECT dictionary, digest FROM dictionaries WHERE dictionary = ? ON CONFLICT DO NOTHING",
            (number,),
        )
        sql.execute("DELETE FROM dictionaries WHERE dictionary = ?", (number,))


def next_dictionary(sql: sqlite3.Connection) -> int:
    """A number that no dictionary of this store ever had. To be called in the transaction that uses it."""
    tables = ["dictionaries"]
    if sql.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'retired'").fetchone():
        tables.append("retired")
    highest = max(sql.execute(f"SELECT max(dictionary) FROM {table}").fetchone()[0] or 0 for table in tables)
    if highest >= MOST:
        raise UserError(f"dictionary {highest}: no number is above; give no dictionary of that number")
    return highest + 1
