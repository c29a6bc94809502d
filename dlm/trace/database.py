"""The tables of a store: inserts, replaces and finds records, which are bytes here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from dlm.errors import UserError
from dlm.trace.codec import FRAME_HEADER, HEAD, dictionary_of
from dlm.trace.connection import Durability
from dlm.trace.facts import Facts, proof
from dlm.trace.session import Session

FIRST, LAST = -(2**63), 2**62  # before and after any `at`
PAGE = 256  # records read at a time
# A row is valid if the index of ids leads to it; so damage to the row or to the index is noticed.
INDEXED = """EXISTS (SELECT 1 FROM traces AS found INDEXED BY sqlite_autoindex_traces_1
    WHERE found.id = traces.id AND found.at = traces.at)"""
ROW = f"SELECT id, at, context, length(record), {INDEXED} FROM traces"
STORED = "SELECT id, at, record, context, digest, {} FROM traces LEFT JOIN contexts USING (context) WHERE {}"
NAMED, LATER = STORED.format("1", "id = ?"), STORED.format(INDEXED, f"at > ? ORDER BY at LIMIT {PAGE}")


class Row(NamedTuple):
    """What the store knows of a trace without opening it."""

    request_id: str
    at: int
    """Ticks of 0.1 ms since 1970 at which it was stored."""
    context: int
    size: int
    """Bytes of its record."""


class Stored(NamedTuple):
    """A record and all that is needed to read it, from one moment."""

    request_id: str
    at: int
    record: bytes
    facts: Facts
    """Its context."""
    dictionary: zstandard.ZstdCompressionDict | None
    damage: str = ""
    """Why it cannot be read; empty if it can."""


class Entry(NamedTuple):
    """A record to be inserted."""

    request_id: str
    facts: bytes
    """The context's JSON."""
    record: bytes
    overwrite: bool = False


class Change(NamedTuple):
    """A record that replaces another one, if that has not changed since it was read."""

    old: Stored
    facts: bytes
    record: bytes


class Outdated(Exception):
    """Records were written with a dictionary that the store no longer has."""


class Database(Session):
    """A store's tables."""

    def __init__(self, path: Path, durability: Durability = "group", create: bool = True) -> None:
        super().__init__(path, durability, create)
        # By digest: another process may give a number to something else.
        self._facts: dict[bytes, Facts] = {}
        self._dictionaries: dict[bytes, zstandard.ZstdCompressionDict] = {}

    def insert(
        self, entries: Sequence[Entry], dictionary: zstandard.ZstdCompressionDict | None = None, keep: bool = False
    ) -> list[bool]:
        """Store records in one transaction; False for each whose id was taken. Raises Outdated where the store lacks
        the dictionary they were written with; with `keep` that is stored, too.
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
        """Replace records in one transaction; False for each whose original has changed or is gone. Raises Outdated
        where the store lacks the dictionary they were written with.
        """
        query = "UPDATE traces SET context = ?, record = ? WHERE at = ? AND id = ? AND record = ?"
        with self.transaction():
            self._require(dictionary, keep=False)
            rows = [
                (self._context_number(facts), record, old.at, old.request_id, old.record)
                for old, facts, record in changes
            ]
            return [self.sql.execute(query, row).rowcount == 1 for row in rows]

    def record(self, request_id: str) -> Stored | None:
        """The record of an id, and what it takes to read it."""
        found = self.read(lambda: [self._stored(*row) for row in self.sql.execute(NAMED, (request_id,))])
        return found[0] if found else None

    def has(self, request_id: str) -> bool:
        return bool(self.query("SELECT 1 FROM traces WHERE id = ?", request_id))

    def rows(self, since: int = FIRST, until: int | None = None, newest: int | None = None) -> list[Row]:
        """The traces stored in [since, until), oldest first; or the `newest` ones, newest first."""
        if newest is not None and newest < 0:
            raise UserError(f"newest = {newest}: must be at least 0")
        order, limit = ("at", -1) if newest is None else ("at DESC", min(newest, LAST))
        query = f"{ROW} WHERE at >= ? AND at < ? ORDER BY {order} LIMIT ?"
        found = self.query(query, since, LAST if until is None else until, limit)
        last = None
        for name, at, context, size, indexed in found:
            kinds = zip((name, at, context, size), (str, int, int, int), strict=True)
            if not (indexed and all(isinstance(value, kind) for value, kind in kinds)):
                raise self._damaged(f"the row of trace {str(name)[:60]!r}")
            if last is not None and (at <= last if newest is None else at >= last):
                raise self._damaged("the order of its traces")
            last = at
        return [Row(*row[:4]) for row in found]

    def check_rows(self) -> None:
        """Raise StoreError where a row does not agree with the index of ids."""
        if self.query(f"SELECT 1 FROM traces NOT INDEXED WHERE NOT {INDEXED} LIMIT 1"):
            raise self._damaged("a row of a trace")

    def records(self, after: int = FIRST) -> Iterator[Stored]:
        """Every trace stored later, oldest first. Raises StoreError where damage keeps it from going on."""
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
        """Store a dictionary under its own number, and return that. Raises UserError where another one has it."""
        if not self._has_dictionary(dictionary):
            with self.transaction():
                self._require(dictionary, keep=True)
        return dictionary.dict_id()

    def _page(self, after: int) -> list[Stored]:
        some = []
        for row in self.sql.execute(LATER, (after,)).fetchall():
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
        """Content that matches its digest. Raises LookupError for any other."""
        column = "facts" if what == "context" else "content"
        found = self.query(f"SELECT {column} FROM {table} WHERE {what} = ?", number)
        content = found[0][0] if found else None
        if not isinstance(content, bytes) or proof(content) != digest:
            raise LookupError(f"{what} {number} is damaged")
        return content

    def _context_number(self, facts: bytes) -> int:
        digest = proof(facts)
        query = "SELECT context, facts IS ? FROM contexts WHERE digest = ?"
        known = self.sql.execute(query, (facts, digest)).fetchone()
        if known is not None:
            if not known[1]:  # it was damaged: whoever needs it would be unreadable
                self.sql.execute("UPDATE contexts SET facts = ? WHERE context = ?", (facts, known[0]))
            return known[0]
        made = self.sql.execute("INSERT INTO contexts (digest, facts) VALUES (?, ?)", (digest, facts)).lastrowid
        assert made is not None
        return made

    def _has_dictionary(self, dictionary: zstandard.ZstdCompressionDict) -> bool:
        """Whether the store has it, undamaged."""
        query = "SELECT 1 FROM dictionaries WHERE dictionary = ? AND digest = ? AND content IS ?"
        return bool(self.query(query, dictionary.dict_id(), proof(dictionary.as_bytes()), dictionary.as_bytes()))

    def _require(self, dictionary: zstandard.ZstdCompressionDict | None, keep: bool) -> None:
        """Make sure that the store has the dictionary that new records were written with. Call in a transaction."""
        if dictionary is None or self._has_dictionary(dictionary):
            return
        number, digest, content = dictionary.dict_id(), proof(dictionary.as_bytes()), dictionary.as_bytes()
        found = self.query("SELECT digest FROM dictionaries WHERE dictionary = ?", number)
        if found == [(digest,)]:  # it was damaged
            self.query("UPDATE dictionaries SET content = ? WHERE dictionary = ?", content, number)
        elif not keep:
            raise Outdated
        elif found:
            raise UserError(f"dictionary {number}: the store has another one of this number")
        else:
            self.query("INSERT INTO dictionaries VALUES (?, ?, ?)", number, digest, content)

    def _one(self, query: str, *values: object) -> int:
        return self.sql.execute(query, values).fetchone()[0]
