"""Keeping a store in order: deleting, checking, redacting, dictionaries, numbers. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError
from dlm.trace.codec import FRAME_HEADER, HEAD, dictionary_of, encode
from dlm.trace.database import StoreError
from dlm.trace.dictionaries import SIZE, add, trained
from dlm.trace.facts import facts
from dlm.trace.redact import Prompts, redacted
from dlm.trace.times import seconds, ticks

if TYPE_CHECKING:
    from dlm.trace.store import TraceStore

NEWEST = 20_000  # traces a dictionary is learned from


@dataclass(kw_only=True)
class Report:
    """What `fsck` found."""

    traces: int = 0
    """Read, and right."""
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
    report = Report()
    try:
        report.database = [line for (line,) in store.database.query("PRAGMA integrity_check") if line != "ok"]
        for record in store.database.records():
            try:
                store.decoded(*record).check()
                report.traces += 1
            except UserError as error:
                report.damaged[record[0]] = str(error)
    except StoreError as error:
        report.database.append(str(error))
    return report


def gc(store: TraceStore, keep: int | str | timedelta) -> int:
    """Delete old traces, and dictionaries no trace needs, and give their room back to the file system."""
    store.flush()
    database = store.database
    if isinstance(keep, int) or str(keep).isdigit():
        newest = list(database.rows(newest=int(keep)))  # type: ignore[arg-type]
        start = newest[-1].at if newest else 2**62
    elif (age := seconds(keep)) is not None and age >= 0:
        start = ticks(keep)
    else:
        raise UserError(f"keep = {keep!r}: give a number of traces, or an age such as 30d")
    with database.transaction():
        gone = database.sql.execute("DELETE FROM traces WHERE at < ?", (start,)).rowcount
        database.sql.execute("DELETE FROM contexts WHERE context NOT IN (SELECT context FROM traces)")
        heads = database.query("SELECT substr(record, 1, ?) FROM traces", HEAD + FRAME_HEADER)
        used = {dictionary_of(head) for (head,) in heads}
        # The newest is what the next trace is written with.
        for (number,) in database.query("SELECT dictionary FROM dictionaries ORDER BY rowid DESC LIMIT -1 OFFSET 1"):
            if number not in used:
                database.query("DELETE FROM dictionaries WHERE dictionary = ?", number)
    store.forget_contexts()
    shrink(store)
    return gone


def redact(store: TraceStore, request_ids: Iterable[str] | None, how: Prompts) -> int:
    """Rewrite traces without their prompts, and overwrite what was there.

    Dictionaries go too, for they hold pieces of what they were learned from: every trace that needs one is written anew,
    and a new one is learned where there are traces enough. One that the store was opened with is its owner's, and stays.
    """
    store.flush()
    if request_ids is None:
        names = [row.request_id for row in store.database.rows()]
    else:
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
    for name in names:
        store[name]  # an unknown or damaged one is told before anything is changed
    store.database.query("PRAGMA secure_delete = ON")
    query = store.database.query
    given = store.dictionaries.chosen if isinstance(store.dictionaries.chosen, bytes) else None
    own = None if given is None else store.dictionaries.to_write_with(store.database)
    for name in names:
        trace = redacted(store[name], how)
        store.database.replace(trace.at, facts(trace.context), encode(trace, own), own)
    learned = {number for (number,) in query("SELECT dictionary FROM dictionaries")} - {own and own.dict_id()}
    for request_id, at, context, record in store.database.records():
        if dictionary_of(record) in learned:
            trace = store.decoded(request_id, at, context, record)
            store.database.replace(at, facts(trace.context), encode(trace, own), own)
    for number in learned:
        query("DELETE FROM dictionaries WHERE dictionary = ?", number)
    if learned and own is None:
        with suppress(UserError):  # too few traces: they do without
            _learn(store, SIZE, NEWEST, max(learned) + 1)
            recompress(store)
    with store.database.transaction():
        store.database.query("DELETE FROM contexts WHERE context NOT IN (SELECT context FROM traces)")
    store.forget_contexts()
    shrink(store)
    return len(names)


def train_dict(store: TraceStore, size: int, newest: int) -> int:
    """Learn from the newest traces, and make what was learnt the store's dictionary."""
    store.flush()
    highest = store.database.query("SELECT max(dictionary) FROM dictionaries")[0][0] or 0
    return _learn(store, size, newest, highest + 1)


def _learn(store: TraceStore, size: int, newest: int, number: int) -> int:
    rows = list(store.database.rows(newest=newest))
    return add(store.database, trained((store[row.request_id] for row in rows), number, size))


def recompress(store: TraceStore) -> int:
    """Encode every trace anew where that makes it smaller."""
    store.flush()
    saved, dictionary = 0, store.dictionaries.to_write_with(store.database)
    for request_id, at, context, record in store.database.records():
        trace = store.decoded(request_id, at, context, record)
        smaller = encode(trace, dictionary)
        if len(smaller) < len(record):
            store.database.replace(at, facts(trace.context), smaller, dictionary)
            saved += len(record) - len(smaller)
    shrink(store)
    return saved


def shrink(store: TraceStore) -> None:
    """Rewrite the file without its gaps, and empty the log beside it."""
    store.database.query("VACUUM")
    store.database.query("PRAGMA wal_checkpoint(TRUNCATE)")


def stats(store: TraceStore) -> dict[str, Any]:
    """Counts and sizes; bytes of the file are what it takes with its log."""
    store.flush()
    query = store.database.query
    query("PRAGMA wal_checkpoint(PASSIVE)")
    count, size, first, last = query("SELECT count(*), sum(length(record)), min(at), max(at) FROM traces")[0]
    files = [store.path.with_name(store.path.name + end) for end in ("", "-wal")]
    on_disk = sum(file.stat().st_size for file in files if file.exists())
    models: dict[str, int] = {}
    for context, traces in query("SELECT context, count(*) FROM traces GROUP BY context"):
        model = str(store.context(context).get("model", "unknown"))
        models[model] = models.get(model, 0) + traces
    return {
        "path": str(store.path),
        "traces": count,
        "file_bytes": on_disk,
        "record_bytes": size or 0,
        "bytes_per_trace": round(on_disk / count, 1) if count else 0.0,
        "record_bytes_per_trace": round((size or 0) / count, 1) if count else 0.0,
        "first": first,
        "last": last,
        "models": models,
        "dictionaries": [number for (number,) in query("SELECT dictionary FROM dictionaries ORDER BY dictionary")],
        "contexts": query("SELECT count(*) FROM contexts")[0][0],
    }
