"""A connection to a store's file: made where there is none, recognised, opened as far as one may. Knows no record."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Literal

from dlm.errors import UserError

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


def connect(path: Path, durability: Durability, create: bool) -> sqlite3.Connection:
    """A connection that threads may take turns with. Raises UserError for what is no store, and SQLite's own errors."""
    if not path.is_file():
        if not create:
            raise UserError(f"{path}: there is no trace store here; give another with --store or DLM_TRACES")
        _make_folder(path)
    # Autocommit: transactions are begun where they are meant.
    sql = sqlite3.connect(_address(path), uri=True, timeout=BUSY, isolation_level=None, check_same_thread=False)
    try:
        _recognise(sql, path)
        for pragma in (f"synchronous = {SYNCHRONOUS[durability]}", "cell_size_check = ON", "trusted_schema = OFF"):
            sql.execute(f"PRAGMA {pragma}")
    except BaseException:
        sql.close()
        raise
    return sql


def _recognise(sql: sqlite3.Connection, path: Path) -> None:
    """Make the tables in a new file, and refuse files that are not ours."""

    def number(query: str) -> int:
        return sql.execute(query).fetchone()[0]

    application, version = number("PRAGMA application_id"), number("PRAGMA user_version")
    if (application, version) == (0, 0):
        if number("SELECT count(*) FROM sqlite_master"):
            raise UserError(f"{path}: an SQLite file, but no trace store")
        sql.execute(f"PRAGMA page_size = {PAGE}")
        _patiently(sql, "PRAGMA journal_mode = WAL")
        with sql:
            sql.execute("BEGIN IMMEDIATE")
            if number("PRAGMA user_version") == 0:  # else another process was faster
                for statement in SCHEMA.strip().split("\n"):
                    sql.execute(statement)
                sql.execute(f"PRAGMA application_id = {APPLICATION}")
                sql.execute(f"PRAGMA user_version = {VERSION}")
    elif application != APPLICATION:
        raise UserError(f"{path}: an SQLite file, but no trace store")
    elif version > VERSION:
        raise UserError(f"{path}: a trace store of version {version}; this dlm reads up to {VERSION}")


def _patiently(sql: sqlite3.Connection, statement: str) -> None:
    """Try again while another process makes the same file: SQLite does not wait for this lock by itself."""
    deadline = time.monotonic() + BUSY
    while True:
        try:
            sql.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _address(path: Path) -> str:
    """The file as SQLite's URI; where nothing can be written, for reading only.

    SQLite's log needs files beside the store even for reading. If there are none and none can be made, nobody writes.
    """
    address = path.absolute().as_uri()
    if not path.is_file() or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return address
    return address + ("?mode=ro" if path.with_name(path.name + "-wal").exists() else "?immutable=1")


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: its folder cannot be made: {error.strerror}") from None
