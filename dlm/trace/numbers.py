"""Numbers of contexts and dictionaries in a store's tables: each given once, never again.

Readers and writers in other processes may hold a number for long. So the highest context number stays in its table as an
empty row when nothing needs it any more, and the dictionaries that went are listed in `retired`. The triggers keep to that
what other versions do to the file; they and the list are made when something is deleted for the first time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from dlm.errors import UserError

MOST = 2**31 - 1  # the numbers above are not for us, by zstd's format
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
        raise UserError(
            f"dictionary {highest}: the store has it, and no number is above; give no dictionary of that number"
        )
    return highest + 1
