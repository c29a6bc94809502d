"""The SQLite file under a store: its tables, and SQL. Knows records as bytes, and nothing of what is in them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import zstandard

from dlm.errors import UserError
from dlm.trace.facts import DIGEST, NO_FACTS, Facts

Durability = Literal["trace", "group", "none"]
# "none" leaves writing to the operating system: a killed process loses nothing, a power cut may.
SYNCHRONOUS: dict[Durability, str] = {"trace": "FULL", "group": "FULL", "none": "OFF"}
APPLICATION, VERSION = 0x646C6D74, 1  # "dlmt"
PAGE = 8192
BUSY = 60.0  # seconds to wait for another process's transaction
# `at` is the tick (0.1 ms) a trace was stored at, made unique: the order of commits, a time and a key in one.
SCHEMA = """
CREATE TABLE traces (at INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, context INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE contexts (context INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, facts BLOB NOT NULL);
CREATE TABLE dictionaries (dictionary INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, content BLOB NOT NULL);
CREATE TABLE pieces (tokenizer TEXT PRIMARY KEY, digest BLOB NOT NULL, content BLOB NOT NULL);
"""


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
        if not path.is_file():
            if not create:
                raise UserError(f"{path}: there is no trace store here; give another with --store or DLM_TRACES")
            _make_folder(path)
        with self._explained():
            # Autocommit: transactions are begun where they are meant.
            self.sql = sqlite3.connect(path, timeout=BUSY, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(durability)
            except BaseException:
                self.sql.close()
                raise

    def close(self) -> None:
        with self.lock:
            self.sql.close()

    def insert(self, entries: Sequence[Entry]) -> list[bool]:
        """Store records in one transaction, all or none; False for each whose id was taken."""
        taken = []
        with self.transaction():
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

    def replace(self, at: int, facts: bytes, record: bytes) -> None:
        """Put another record and context in the place of one."""
        with self.transaction():
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
        self.sql.execute("INSERT INTO contexts (digest, facts) VALUES (?, ?) ON CONFLICT DO NOTHING", (digest, facts))
        return self._one("SELECT context FROM contexts WHERE digest = ?", digest)

    def _one(self, query: str, *values: object) -> int:
        return self.sql.execute(query, values).fetchone()[0]

    def _prepare(self, durability: Durability) -> None:
        """Make the tables in a new file, and refuse files that are not ours."""
        known = self._one("PRAGMA application_id"), self._one("PRAGMA user_version")
        if known == (0, 0):
            if self._one("SELECT count(*) FROM sqlite_master"):
                raise UserError(f"{self.path}: an SQLite file, but no trace store")
            self.sql.execute(f"PRAGMA page_size = {PAGE}")
            self._patiently("PRAGMA journal_mode = WAL")
            with self.transaction():
                if self._one("PRAGMA user_version") == 0:  # else another process was faster
                    for statement in SCHEMA.strip().split("\n"):
                        self.sql.execute(statement)
                    self.sql.execute(f"PRAGMA application_id = {APPLICATION}")
                    self.sql.execute(f"PRAGMA user_version = {VERSION}")
        elif known[0] != APPLICATION:
            raise UserError(f"{self.path}: an SQLite file, but no trace store")
        elif known[1] > VERSION:
            raise UserError(f"{self.path}: a trace store of version {known[1]}; this dlm reads up to {VERSION}")
        for pragma in (f"synchronous = {SYNCHRONOUS[durability]}", "cell_size_check = ON", "trusted_schema = OFF"):
            self.sql.execute(f"PRAGMA {pragma}")

    def _patiently(self, statement: str) -> None:
        """Try again while another process makes the same file: SQLite does not wait for this lock by itself."""
        deadline = time.monotonic() + BUSY
        while True:
            try:
                self.sql.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

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


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: its folder cannot be made: {error.strerror}") from None
