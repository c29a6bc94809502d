"""The database under a store: what is put into its tables and found there. Knows records as bytes, not what is in them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import zstandard

from dlm.errors import UserError
from dlm.trace.connection import Durability, connect
from dlm.trace.facts import DIGEST, NO_FACTS, Facts


class StoreError(UserError):
    """SQLite could not do what was asked: a full disk, a damaged file."""


class Row(NamedTuple):
    """What the store knows of a trace without opening it."""

    request_id: str
    at: int
    """Ticks of 0.1 ms since 1970 at which it was stored."""
    context: int
    size: int
    """Bytes of its record."""


class Entry(NamedTuple):
    """A record to be inserted."""

    request_id: str
    facts: bytes
    """The context's JSON."""
    record: bytes
    overwrite: bool = False


class Database:
    """One connection, which threads take turns with."""

    def __init__(self, path: Path, durability: Durability = "group", create: bool = True) -> None:
        self.path = path
        self.lock = threading.RLock()
        with self._explained():
            self.sql = connect(path, durability, create)

    def close(self) -> None:
        with self.lock:
            self.sql.close()

    def insert(self, entries: Sequence[Entry], dictionary: zstandard.ZstdCompressionDict | None = None) -> list[bool]:
        """Store records in one transaction, all or none, and what they were written with; False where an id was taken."""
        taken = []
        with self.transaction():
            self._bring_back(dictionary)
            at = self._one("SELECT max(at) FROM traces") or 0
            for entry in entries:
                at = max(at + 1, time.time_ns() // 100_000)
                if entry.overwrite:
                    self.sql.execute("DELETE FROM traces WHERE id = ?", (entry.request_id,))
                done = self.sql.execute(
                    "INSERT INTO traces VALUES (?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                    (at, entry.request_id, self._context_number(entry.facts), entry.record),
                )
                taken.append(done.rowcount == 1)
        return taken

    def replace(
        self, at: int, facts: bytes, record: bytes, dictionary: zstandard.ZstdCompressionDict | None = None
    ) -> None:
        """Put another record and context in the place of one, and keep what it was written with."""
        with self.transaction():
            self._bring_back(dictionary)
            self.sql.execute(
                "UPDATE traces SET context = ?, record = ? WHERE at = ?", (self._context_number(facts), record, at)
            )

    def record(self, request_id: str) -> tuple[int, int, bytes] | None:
        """(at, context, record) of an id."""
        with self._explained():
            return self.sql.execute("SELECT at, context, record FROM traces WHERE id = ?", (request_id,)).fetchone()

    def rows(self, since: int = 0, until: int | None = None, newest: int | None = None) -> Iterator[Row]:
        """The traces stored in [since, until), oldest first; or the `newest` ones, newest first."""
        order = "at" if newest is None else "at DESC"
        limit, end = -1 if newest is None else newest, 2**62 if until is None else until
        query = f"SELECT id, at, context, length(record) FROM traces WHERE at >= ? AND at < ? ORDER BY {order} LIMIT ?"
        return self._paged(query, since, end, limit)

    def records(self, after: int = -1) -> Iterator[tuple[str, int, int, bytes]]:
        """(id, at, context, record) of every trace stored later, oldest first."""
        while True:
            with self._explained():
                some = self.sql.execute(
                    "SELECT id, at, context, record FROM traces WHERE at > ? ORDER BY at LIMIT 256", (after,)
                ).fetchall()
            yield from some
            if not some:
                return
            after = some[-1][1]

    def context(self, number: int) -> Facts:
        """The facts behind a context's number, checked."""
        found = self.query("SELECT digest, facts FROM contexts WHERE context = ?", number)
        if not found:
            raise LookupError(f"it names context {number}, which is not in the store")
        facts = Facts(found[0][1])
        if facts.digest != found[0][0]:
            raise LookupError(f"context {number} is damaged")
        return facts

    def dictionary(self, number: int) -> zstandard.ZstdCompressionDict:
        """The dictionary of a number, checked."""
        found = self.query("SELECT digest, content FROM dictionaries WHERE dictionary = ?", number)
        if not found:
            raise LookupError(f"it needs dictionary {number}, which is not in the store")
        if blake2b(found[0][1], digest_size=DIGEST).digest() != found[0][0]:
            raise LookupError(f"dictionary {number} is damaged")
        return zstandard.ZstdCompressionDict(found[0][1])

    def add_dictionary(self, dictionary: zstandard.ZstdCompressionDict) -> int:
        """Keep a dictionary under the number it bears, and return that. Raises UserError where another one has it."""
        with self.transaction():
            self._keep_dictionary(dictionary)
        return dictionary.dict_id()

    def query(self, query: str, *values: object) -> list[tuple]:
        """All rows of a query."""
        with self._explained():
            return self.sql.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the writers' lock; all that is done inside is kept, or none of it."""
        with self._explained():
            self.sql.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.sql.execute("COMMIT")
            except BaseException:
                if self.sql.in_transaction:  # a full disk rolls back by itself
                    self.sql.execute("ROLLBACK")
                raise

    def _paged(self, query: str, *values: object) -> Iterator[Row]:
        with self._explained():
            found = self.sql.execute(query, values).fetchall()
        return map(Row._make, found)

    def _context_number(self, facts: bytes) -> int:
        digest = blake2b(facts, digest_size=DIGEST).digest() if facts else NO_FACTS
        known = self.sql.execute("SELECT context FROM contexts WHERE digest = ?", (digest,)).fetchone()
        if known is not None:
            return known[0]
        made = self.sql.execute("INSERT INTO contexts (digest, facts) VALUES (?, ?)", (digest, facts)).lastrowid
        assert made is not None
        return made

    def _bring_back(self, dictionary: zstandard.ZstdCompressionDict | None) -> None:
        """Keep what records to come were written with, if another process has tidied it away since."""
        if dictionary is not None:
            known = self._one("SELECT count(*) FROM dictionaries WHERE dictionary = ?", dictionary.dict_id())
            if not known:
                self._keep_dictionary(dictionary)

    def _keep_dictionary(self, dictionary: zstandard.ZstdCompressionDict) -> None:
        number, content = dictionary.dict_id(), dictionary.as_bytes()
        digest = blake2b(content, digest_size=DIGEST).digest()
        self.sql.execute("INSERT INTO dictionaries VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (number, digest, content))
        if not self._one("SELECT count(*) FROM dictionaries WHERE dictionary = ? AND digest = ?", number, digest):
            raise UserError(f"dictionary {number}: the store has another one of this number")

    def _one(self, query: str, *values: object) -> int:
        return self.sql.execute(query, values).fetchone()[0]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's errors as ours, with the file's name; one thread at a time."""
        with self.lock:
            try:
                yield
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}{_advice(error)}") from error


def _advice(error: sqlite3.Error) -> str:
    name = getattr(error, "sqlite_errorname", "")
    return next((text for start, text in ADVICE.items() if name.startswith(start)), "")


ADVICE = {
    "SQLITE_FULL": ": make room; what was stored before can be read",
    "SQLITE_CORRUPT": ": dlm-trace fsck says which traces are whole",
    "SQLITE_NOTADB": ": this is no trace store",
    "SQLITE_CANTOPEN": ": it cannot be opened; is the path right, and the folder writable?",
    "SQLITE_READONLY": ": it cannot be written",
}
