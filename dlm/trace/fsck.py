"""Whether a store is whole: SQLite's own check, then every trace read. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlm.errors import UserError
from dlm.trace.codec import CorruptTrace
from dlm.trace.database import Stored
from dlm.trace.session import StoreError

if TYPE_CHECKING:
    from dlm.trace.store import TraceStore


@dataclass(kw_only=True)
class Report:
    """What `fsck` found."""

    traces: int = 0
    """Traces that were read and are undamaged."""
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong, by id."""
    database: list[str] = field(default_factory=list)
    """SQLite's own complaints."""

    @property
    def ok(self) -> bool:
        return not self.damaged and not self.database


def fsck(store: TraceStore) -> Report:
    """Let SQLite check its file, then read every trace and replay its digests."""
    store.flush()
    report, database = Report(), store.database

    def noted(error: StoreError) -> None:
        if error.code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise error
        if error.what not in report.database:
            report.database.append(error.what)

    def examine(stored: Stored) -> None:
        try:
            store.decoded(stored).check()
            report.traces += 1
        except UserError as error:
            report.damaged[stored.request_id] = str(error)

    seen = set()
    try:
        report.database += [line for (line,) in database.query("PRAGMA integrity_check") if line != "ok"]
        report.database += _shared_damage(store)
        for stored in database.records():
            seen.add(stored.request_id)
            examine(stored)
    except StoreError as error:
        noted(error)
        for name in _indexed(store):
            if name not in seen:
                try:
                    found = database.record(name)
                except StoreError as error:
                    report.damaged[name] = error.what
                else:
                    if found is not None:
                        examine(found)
    return report


def _shared_damage(store: TraceStore) -> list[str]:
    """What is wrong with dictionaries and tokenizers, which traces share."""
    found = []
    for (number,) in store.database.query("SELECT dictionary FROM dictionaries"):
        try:
            store.database.dictionary(number)
        except LookupError as error:
            found.append(str(error))
    for (tokenizer,) in store.database.query("SELECT tokenizer FROM pieces"):
        try:
            store.pieces(str(tokenizer))
        except CorruptTrace as error:
            found.append(str(error))
    return found


def _indexed(store: TraceStore) -> list[str]:
    """All ids by the index, for a store whose traces cannot be read in order."""
    try:
        return [str(name) for (name,) in store.database.query("SELECT id FROM traces ORDER BY id")]
    except StoreError:
        return []
