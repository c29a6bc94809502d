"""The database under a store: what is put into its tables and found there. Knows records as bytes, not what is in them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import zstandard

from dlm.errors import UserError
from dlm.trace.codec import FRAME_HEADER, HEAD, dictionary_of
from dlm.trace.connection import BUSY, Durability, connect
from dlm.trace.facts import DIGEST, NO_FACTS, Facts
from dlm.trace.stored import Change, Entry, Row, Stored

T = TypeVar("T")
FIRST, LAST = -(2**63), 2**62  # before and after any `at`
PAGE = 256  # records read at a time
# A row counts where the index of ids leads to it: one that was damaged in either place is noticed.
INDEXED = """EXISTS (SELECT 1 FROM traces AS found INDEXED BY sqlite_autoindex_traces_1
    WHERE found.id = traces.id AND found.at = traces.at)"""
ROW = f"SELECT id, at, context, length(record), {INDEXED} FROM traces"
STORED = f"SELECT id, at, record, context, digest, {INDEXED} FROM traces LEFT JOIN contexts USING (context)"


class StoreError(UserError):
    """SQLite could not do what was asked: a full disk, a damaged file."""

    def __init__(self, what: str, code: str = "") -> None:
        advice = next((text for start, text in ADVICE.items() if code.startswith(start)), "")
        super().__init__(what + advice)
        self.what, self.code = what, code


class Outdated(Exception):
    """Records were written with a dictionary that the store has no more."""


class Database:
    """One connection, which threads take turns with."""

    def __init__(self, path: Path, durability: Durability = "group", create: bool = True) -> None:
        self.path, self.durability = path, durability
        self.lock = threading.RLock()
        # By digest: another process may give a number to something else.
        self._facts: dict[bytes, Facts] = {}
        self._dictionaries: dict[bytes, zstandard.ZstdCompressionDict] = {}
        with self._explained():
            self._opened = connect(path, durability, create)

    @property
    def sql(self) -> sqlite3.Connection:
        return self._opened.sql

    @property
    def writable(self) -> bool:
        """Whether this process may write the file."""
        return self._opened.writable

    def close(self) -> None:
        with self.lock:
            self.sql.close()

    def insert(
        self,
        entries: Sequence[Entry],
        dictionary: zstandard.ZstdCompressionDict | None = None,
        keep: bool = False,
    ) -> list[bool]:
        """Store records in one transaction, all or none; False where an id was taken.

        Raises Outdated where the store has not the dictionary they were written with; with `keep` it is stored, too.
        """
        taken = []
        with self.transaction():
            self._require(dictionary, keep)
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

    def replace(self, changes: Sequence[Change], dictionary: zstandard.ZstdCompressionDict | None = None) -> list[bool]:
        """Put records in the place of those they were made from, in one transaction; False where that one is gone.

        Raises Outdated where the store has not the dictionary they were written with.
        """
        query = "UPDATE traces SET context = ?, record = ? WHERE at = ? AND id = ? AND record = ?"
        with self.transaction():
            self._require(dictionary, keep=False)
            return [
                self.sql.execute(
                    query, (self._context_number(facts), record, old.at, old.request_id, old.record)
                ).rowcount
                == 1
                for old, facts, record in changes
            ]

    def record(self, request_id: str) -> Stored | None:
        """The record of an id, and what it takes to read it."""
        found = self.read(
            lambda: [self._stored(*row) for row in self.sql.execute(f"{STORED} WHERE id = ?", (request_id,))]
        )
        return found[0] if found else None

    def has(self, request_id: str) -> bool:
        return bool(self.query("SELECT 1 FROM traces WHERE id = ?", request_id))

    def rows(self, since: int = FIRST, until: int | None = None, newest: int | None = None) -> list[Row]:
        """The traces stored in [since, until), oldest first; or the `newest` ones, newest first."""
        order, limit = ("at", -1) if newest is None else ("at DESC", newest)
        query = f"{ROW} WHERE at >= ? AND at < ? ORDER BY {order} LIMIT ?"
        found = self.query(query, since, LAST if until is None else until, limit)
        last = None
        for name, at, context, size, indexed in found:
            if not (
                indexed
                and isinstance(at, int)
                and isinstance(name, str)
                and isinstance(context, int)
                and isinstance(size, int)
            ):
                raise self._damaged(f"the row of trace {str(name)[:60]!r}")
            if last is not None and (at <= last if newest is None else at >= last):
                raise self._damaged("the order of its traces")
            last = at
        return [Row(*row[:4]) for row in found]

    def records(self, after: int = FIRST) -> Iterator[Stored]:
        """Every trace stored later, oldest first; ends with StoreError where the file is damaged so that none follows."""
        while some := self.read(lambda: self._page(after)):  # noqa: B023 read at once
            yield from some
            after = some[-1].at

    def facts(self, context: int) -> Facts:
        """The facts behind a context's number, checked. Raises LookupError."""
        found = self.query("SELECT digest FROM contexts WHERE context = ?", context)
        return self._shared(context, found[0][0] if found else None)

    def dictionary(self, number: int) -> zstandard.ZstdCompressionDict:
        """The dictionary of a number, checked. Raises LookupError."""
        found = self.query("SELECT digest FROM dictionaries WHERE dictionary = ?", number)
        if not found:
            raise LookupError(f"it needs dictionary {number}, which is not in the store")
        if found[0][0] not in self._dictionaries:
            content = self._checked("dictionaries", "dictionary", number, found[0][0])
            self._dictionaries[found[0][0]] = zstandard.ZstdCompressionDict(content)
        return self._dictionaries[found[0][0]]

    def add_dictionary(self, dictionary: zstandard.ZstdCompressionDict) -> int:
        """Keep a dictionary under the number it bears, and return that. Raises UserError where another one has it."""
        if not self._has_dictionary(dictionary):
            with self.transaction():
                self._require(dictionary, keep=True)
        return dictionary.dict_id()

    def query(self, query: str, *values: object) -> list[tuple]:
        """All rows of one statement."""
        return self._tried(lambda: self.sql.execute(query, values).fetchall())

    def read(self, work: Callable[[], T]) -> T:
        """What several statements give that see one state of the store."""

        def at_one_moment() -> T:
            if self.sql.in_transaction:
                return work()
            self.sql.execute("BEGIN")
            try:
                return work()
            finally:
                if self.sql.in_transaction:
                    self.sql.execute("ROLLBACK")  # nothing was written

        return self._tried(at_one_moment)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the writers' lock; all that is done inside is kept, or none of it. Within another it is part of that."""
        with self._explained():
            if self.sql.in_transaction:
                yield
                return
            self.sql.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.sql.execute("COMMIT")
            except BaseException:
                if self.sql.in_transaction:  # a full disk rolls back by itself
                    self.sql.execute("ROLLBACK")
                raise

    def _tried(self, work: Callable[[], T]) -> T:
        """The result; where the file is read as it lies and was written meanwhile, it is opened anew and read again."""
        deadline = time.monotonic() + BUSY
        with self._explained():
            while not self.sql.in_transaction:
                if not self._opened.current():
                    old, self._opened = self._opened, connect(self.path, self.durability, create=False)
                    old.sql.close()
                try:
                    result = work()
                except sqlite3.Error:
                    if self._opened.current():
                        raise
                else:
                    if self._opened.current():
                        return result
                if time.monotonic() > deadline:
                    raise StoreError(f"{self.path}: it is written without a pause, and cannot be read meanwhile")
            return work()

    def _page(self, after: int) -> list[Stored]:
        query = f"{STORED} WHERE at > ? ORDER BY at LIMIT {PAGE}"
        some = []
        for row in self.sql.execute(query, (after,)).fetchall():
            if not isinstance(row[1], int) or row[1] <= after:
                raise self._damaged("the order of its traces")
            after = row[1]
            some.append(self._stored(*row))
        return some

    def _stored(self, name: Any, at: Any, record: Any, context: Any, digest: Any, indexed: int) -> Stored:
        shared, dictionary, damage = Facts(b""), None, ""
        if not (indexed and isinstance(name, str) and isinstance(at, int) and isinstance(record, bytes)):
            damage, name, record = "its row in the file is damaged", str(name), b""
        else:
            try:
                shared = self._shared(context, digest)
                number = dictionary_of(record[: HEAD + FRAME_HEADER])
                dictionary = self.dictionary(number) if number else None
            except LookupError as error:
                damage = str(error)
        return Stored(name, at, record, shared, dictionary, damage)

    def _shared(self, context: int, digest: bytes | None) -> Facts:
        if digest is None:
            raise LookupError(f"it names context {context}, which is not in the store")
        if digest not in self._facts:
            self._facts[digest] = Facts(self._checked("contexts", "context", context, digest))
        return self._facts[digest]

    def _checked(self, table: str, what: str, number: int, digest: bytes) -> bytes:
        """Content that is what its digest says. Raises LookupError."""
        column = "facts" if what == "context" else "content"
        found = self.query(f"SELECT {column} FROM {table} WHERE {what} = ?", number)
        content = found[0][0] if found else None
        if not isinstance(content, bytes) or blake2b(content, digest_size=DIGEST).digest() != digest:
            raise LookupError(f"{what} {number} is damaged")
        return content

    def _context_number(self, facts: bytes) -> int:
        digest = blake2b(facts, digest_size=DIGEST).digest() if facts else NO_FACTS
        known = self.sql.execute("SELECT context FROM contexts WHERE digest = ?", (digest,)).fetchone()
        if known is not None:
            return known[0]
        made = self.sql.execute("INSERT INTO contexts (digest, facts) VALUES (?, ?)", (digest, facts)).lastrowid
        assert made is not None
        return made

    def _has_dictionary(self, dictionary: zstandard.ZstdCompressionDict) -> bool:
        digest = blake2b(dictionary.as_bytes(), digest_size=DIGEST).digest()
        query = "SELECT 1 FROM dictionaries WHERE dictionary = ? AND digest = ?"
        return bool(self.query(query, dictionary.dict_id(), digest))

    def _require(self, dictionary: zstandard.ZstdCompressionDict | None, keep: bool) -> None:
        """See to it that the store has what records to come were written with. To be called in a transaction."""
        if dictionary is None or self._has_dictionary(dictionary):
            return
        if not keep:
            raise Outdated
        number, content = dictionary.dict_id(), dictionary.as_bytes()
        if self.query("SELECT 1 FROM dictionaries WHERE dictionary = ?", number):
            raise UserError(f"dictionary {number}: the store has another one of this number")
        digest = blake2b(content, digest_size=DIGEST).digest()
        self.sql.execute("INSERT INTO dictionaries VALUES (?, ?, ?)", (number, digest, content))

    def _one(self, query: str, *values: object) -> int:
        return self.sql.execute(query, values).fetchone()[0]

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self.path}: {what} is damaged", "SQLITE_CORRUPT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's errors as ours, with the file's name; one thread at a time."""
        with self.lock:
            try:
                yield
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}", getattr(error, "sqlite_errorname", "")) from error


ADVICE = {
    "SQLITE_FULL": ": make room; what was stored before can be read",
    "SQLITE_CORRUPT": ": dlm-trace fsck says which traces are whole",
    "SQLITE_NOTADB": ": this is no trace store",
    "SQLITE_CANTOPEN": ": it cannot be opened; is the path right, and the folder writable?",
    "SQLITE_READONLY": ": it cannot be written",
    "SQLITE_BUSY": f": another process has held it for {BUSY:.0f} s",
}
