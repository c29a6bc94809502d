"""An open file with explained errors, consistent reads, and transactions."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from dlm.errors import UserError
from dlm.trace.connection import BUSY, Durability, connect

T = TypeVar("T")
ADVICE = {
    "SQLITE_FULL": ": make room; what was stored before can be read",
    "SQLITE_CORRUPT": ": dlm-trace fsck says which traces are whole",
    "SQLITE_NOTADB": ": this is no trace store",
    "SQLITE_CANTOPEN": ": it cannot be opened; is the path right, and the folder writable?",
    "SQLITE_READONLY": ": it cannot be written",
    "SQLITE_BUSY": f": another process has held it for {BUSY:.0f} s",
}


class StoreError(UserError):
    """SQLite failed: a full disk, a damaged file. The message says what to do."""

    def __init__(self, what: str, code: str = "") -> None:
        advice = next((text for start, text in ADVICE.items() if code.startswith(start)), "")
        super().__init__(what + advice)
        self.what, self.code = what, code


class Session:
    """A connection that one thread uses at a time."""

    def __init__(self, path: Path, durability: Durability = "group", create: bool = True) -> None:
        self.path = path
        self.durability: Durability = durability
        self.lock = threading.RLock()
        self._inside = False
        with self._explained():
            self._opened = connect(path, durability, create)

    @property
    def sql(self) -> sqlite3.Connection:
        return self._opened.sql

    @property
    def writable(self) -> bool:
        return self._opened.writable

    def close(self) -> None:
        with self.lock:
            self.sql.close()

    def query(self, query: str, *values: object) -> list[tuple]:
        return self._tried(lambda: self.sql.execute(query, values).fetchall())

    def read(self, work: Callable[[], T]) -> T:
        """The result of `work`, whose statements all see one state of the store."""

        def at_one_moment() -> T:
            with self._begun("BEGIN"):
                return work()

        return self._tried(at_one_moment)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A write transaction: everything inside is kept, or nothing. Inside another one it is part of that."""
        with self._explained(), self._begun("BEGIN IMMEDIATE"):
            yield

    @contextmanager
    def _begun(self, statement: str) -> Iterator[None]:
        if self._inside:
            yield
            return
        try:
            self._inside = True
            if self.sql.in_transaction:  # an interrupt (Ctrl-C) may have come before its end
                self.sql.execute("ROLLBACK")
            self.sql.execute(statement)
            yield
            self.sql.execute("COMMIT")
        finally:
            self._inside = False
            if self.sql.in_transaction:  # a full disk rolls back by itself
                self.sql.execute("ROLLBACK")

    def _tried(self, work: Callable[[], T]) -> T:
        """The result of `work`, done again if a file that is read as immutable was written meanwhile."""
        deadline = time.monotonic() + BUSY
        with self._explained():
            while not self._inside:
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

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self.path}: {what} is damaged", "SQLITE_CORRUPT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Holds the lock, and turns SQLite's errors into StoreErrors that name the file."""
        with self.lock:
            try:
                yield
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: {error}", getattr(error, "sqlite_errorname", "")) from error
            except UnicodeDecodeError as error:  # SQLite's message quotes what is damaged
                message = error.object.decode("utf-8", "replace")
                raise StoreError(f"{self.path}: {message}", "SQLITE_CORRUPT") from error
