"""Opens a store's file: creates a new one, refuses other files, and reads without write permission where it must."""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dlm.errors import UserError

Durability = Literal["trace", "group", "none"]
# "none" does not wait for the disk at a commit. It is not OFF: with OFF this process would merge the log without a
# sync, and a power cut could lose other processes' traces or damage the file.
SYNCHRONOUS: dict[Durability, str] = {"trace": "FULL", "group": "FULL", "none": "NORMAL"}
APPLICATION, VERSION = 0x646C6D74, 1  # "dlmt"
PAGE = 8192
BUSY = 60.0  # seconds to wait for another process's transaction
TRIES = 5  # at opening a file for reading while its owner opens or closes it
# `at` is the tick (0.1 ms) at which a trace was stored, made unique: it is time, key and order of commits in one.
SCHEMA = """
CREATE TABLE traces (at INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, context INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE contexts (context INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, facts BLOB NOT NULL);
CREATE TABLE dictionaries (dictionary INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, content BLOB NOT NULL);
CREATE TABLE pieces (tokenizer TEXT PRIMARY KEY, digest BLOB NOT NULL, content BLOB NOT NULL);
"""
TABLES = [statement.rstrip(";") for statement in SCHEMA.strip().split("\n")]


class Stamp(NamedTuple):
    """Properties of a file that change when it is written to."""

    inode: int
    size: int
    modified: int
    """Nanoseconds since 1970."""
    log: bool
    """Whether there is a log beside it: a process has the file open for writing, or was killed while it had."""


@dataclass(frozen=True)
class Connection:
    """An open file. `still` is the stamp of a file that is read as one that nobody writes; else None."""

    sql: sqlite3.Connection
    path: Path
    writable: bool
    still: Stamp | None = None

    def current(self) -> bool:
        """Whether a file that is read as one that nobody writes is still unchanged."""
        return self.still is None or _stamp(self.path) == self.still


def connect(path: Path, durability: Durability, create: bool) -> Connection:
    """A connection that threads may take turns with. Raises UserError for what is no store, and SQLite's own errors."""
    if not path.is_file():
        if not create:
            raise UserError(f"{path}: there is no trace store here; give another with --store or DLM_TRACES")
        _make_folder(path)
    for trial in range(1, TRIES + 1):
        options, writable, still = _way(path, create)
        # Autocommit: transactions are begun explicitly.
        sql = sqlite3.connect(
            f"{path.absolute().as_uri()}?{options}",
            uri=True,
            timeout=BUSY,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            sql.text_factory = _text
            _recognise(sql, path)
            for pragma in (f"synchronous = {SYNCHRONOUS[durability]}", "cell_size_check = ON", "trusted_schema = OFF"):
                sql.execute(f"PRAGMA {pragma}")
            return Connection(sql, path, writable, still)
        except sqlite3.OperationalError:
            sql.close()
            if writable or trial == TRIES:
                raise
            time.sleep(0.05 * trial)  # its owner opened or closed it just now
        except BaseException:
            sql.close()
            raise
    raise AssertionError("unreachable")


def _way(path: Path, create: bool) -> tuple[str, bool, Stamp | None]:
    """SQLite's options to open a file with, whether it may be written, and its stamp if it is read as immutable.

    A reader without write permission has two ways. If the owner's log and its index are beside the file, the reader
    follows what the owner writes. If there is no log, nobody writes: the file is read as immutable until its stamp changes.
    """
    if not path.is_file():
        return "mode=rwc" if create else "mode=rw", True, None
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return "mode=rw", True, None
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: you may not read it; its owner can allow it (chmod a+r)")
    log, index = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    if log.exists() and index.exists():
        for file in (log, index):
            if not os.access(file, os.R_OK):
                raise UserError(f"{file}: you may not read it, and {path.name} is being written; allow it (chmod a+r)")
        return "mode=ro&readonly_shm=1", False, None  # else a reader could leave files behind that lock the owner out
    stamp = _stamp(path)
    if stamp.log:
        raise UserError(
            f"{log}: this log was not merged into {path.name}, because a process was killed, and you may not write here; "
            "who may write can merge it: dlm-trace stats --store FILE"
        )
    return "mode=ro&immutable=1", False, stamp


def _stamp(path: Path) -> Stamp:
    log = path.with_name(path.name + "-wal")
    file = path.stat()
    merged = not log.exists() or (log.stat().st_size == 0 and not path.with_name(path.name + "-shm").exists())
    return Stamp(file.st_ino, file.st_size, file.st_mtime_ns, not merged)


def _recognise(sql: sqlite3.Connection, path: Path) -> None:
    """Make the tables in a new file, and refuse files that are not ours."""
    application, version, tables = _look(sql)
    if (application, version) == (0, 0):
        if tables:
            raise UserError(f"{path}: an SQLite file, but no trace store")
        sql.execute(f"PRAGMA page_size = {PAGE}")
        _patiently(sql, "PRAGMA journal_mode = WAL")
        with sql:
            sql.execute("BEGIN IMMEDIATE")
            if sql.execute("PRAGMA user_version").fetchone()[0] == 0:  # else another process was faster
                for statement in TABLES:
                    sql.execute(statement)
                sql.execute(f"PRAGMA application_id = {APPLICATION}")
                sql.execute(f"PRAGMA user_version = {VERSION}")
        application, version, tables = _look(sql)
    if application != APPLICATION:
        raise UserError(f"{path}: an SQLite file, but no trace store")
    if version > VERSION:
        raise UserError(f"{path}: a trace store of version {version}; this dlm reads up to {VERSION}")
    if version < 1 or not set(TABLES) <= tables:
        raise UserError(f"{path}: its tables are not those of a trace store: the file is damaged; restore a copy")


def _look(sql: sqlite3.Connection) -> tuple[int, int, set[str]]:
    """Application, version and the statements that made the tables, all at one moment."""
    with sql:
        sql.execute("BEGIN")
        numbers = [sql.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        return *numbers, {made for (made,) in sql.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}


def _text(data: bytes) -> str:
    """Decode text leniently: in a damaged file it may not be UTF-8, and the digest refuses it later."""
    return data.decode("utf-8", "replace")


def _patiently(sql: sqlite3.Connection, statement: str) -> None:
    """Retry while another process creates the same file: SQLite does not wait for this lock by itself."""
    deadline = time.monotonic() + BUSY
    while True:
        try:
            sql.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: its folder cannot be made: {error.strerror}") from None
