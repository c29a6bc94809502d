"""Maintains a store: deletes, redacts and recompresses traces, counts and measures them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError
from dlm.trace.codec import FRAME_HEADER, HEAD, dictionary_of, encode
from dlm.trace.connection import BUSY
from dlm.trace.database import LAST, Change, Outdated
from dlm.trace.dictionaries import GONE, NoDictionary, drop_contexts, drop_dictionaries, train_dict
from dlm.trace.facts import facts
from dlm.trace.redact import Prompts, redacted
from dlm.trace.session import StoreError
from dlm.trace.times import iso, seconds, ticks
from dlm.trace.trace import Trace

if TYPE_CHECKING:
    import zstandard

    from dlm.trace.store import TraceStore

BATCH = 256  # records replaced in one commit
PATIENCE = 3  # attempts before other writers are locked out
READER = 2.0  # seconds to wait for readers if the log may be emptied later


def gc(store: TraceStore, keep: int | str | timedelta) -> int:
    """Delete all but the newest `keep` traces, or those older than an age such as "30d"; returns how many.

    Dictionaries that no trace needs are deleted too, and the file shrinks.
    """
    store.flush()
    database = store.database
    count = int(keep) if isinstance(keep, int) or str(keep).isdecimal() else None  # type: ignore[arg-type]
    size = seconds(keep) if count is None else count
    if size is None or size < 0:
        raise UserError(f"keep = {keep!r}: give a number of traces, or an age such as 30d")
    with database.transaction():
        if count is None:
            start = ticks(keep)
        else:
            newest = database.rows(newest=count)
            start = newest[-1].at if newest else LAST
        database.check_rows()  # the age of a damaged row may be wrong
        gone = database.sql.execute("DELETE FROM traces WHERE at < ?", (start,)).rowcount
        drop_contexts(database.sql)
        # The newest is what the next trace is written with.
        learned = {number for (number,) in database.query("SELECT dictionary FROM dictionaries")}
        used = {dictionary_of(head) for _, head in _heads(store)}
        drop_dictionaries(database.sql, learned - used - {max(learned, default=0)})
    shrink(store)
    return gone


def redact(store: TraceStore, request_ids: Iterable[str] | None = None, how: Prompts = "omit") -> int:
    """Take the prompts out of these traces (all by default), for good; returns how many there were.

    Dictionaries hold pieces of the prompts they were learned from, so they are deleted too: traces that need one are
    rewritten, and a new one is learned if there are enough traces. The dictionary that the store was opened with stays.
    """
    store.flush()
    database, own = store.database, store.dictionaries.own
    # An unknown or damaged trace is an error before anything is changed.
    if request_ids is None:
        names = [trace.request_id for trace in store]
    else:
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for name in names:
            store[name]
    database.query("PRAGMA secure_delete = ON")

    def to_write_with() -> zstandard.ZstdCompressionDict | None:
        return None if own is None else store.dictionaries.to_write_with(database)

    count, _ = rewrite(store, names, to_write_with, lambda trace: redacted(trace, how))
    # A dictionary that is learned from now on knows only redacted prompts (see `train_dict`).
    learned = {number for (number,) in database.query("SELECT dictionary FROM dictionaries")} - {own and own.dict_id()}
    rewrite(store, _written_with(store, learned), to_write_with)
    with database.transaction():
        rewrite(store, _written_with(store, learned), to_write_with)  # what others have stored since
        drop_dictionaries(database.sql, learned)
        drop_contexts(database.sql)
    if learned and own is None:
        with suppress(NoDictionary):  # too few traces: they do without
            train_dict(store)
            recompress(store)
    shrink(store, for_good=True)
    return count


def _heads(store: TraceStore) -> list[tuple[str, bytes]]:
    """Ids, and what says which dictionary a record was written with."""
    return store.database.query("SELECT id, substr(record, 1, ?) FROM traces", HEAD + FRAME_HEADER)  # type: ignore[return-value]


def _written_with(store: TraceStore, dictionaries: Collection[int]) -> list[str]:
    return [name for name, head in _heads(store) if dictionary_of(head) in dictionaries] if dictionaries else []


def recompress(store: TraceStore) -> int:
    """Write every record anew with the newest dictionary where that makes it smaller; returns the bytes saved."""
    store.flush()
    names = [row.request_id for row in store.database.rows()]
    newest = partial(store.dictionaries.to_write_with, store.database)
    _, saved = rewrite(store, names, newest, if_smaller=True)
    shrink(store)
    return saved


def shrink(store: TraceStore, for_good: bool = False) -> None:
    """Compact the file and empty its log. With `for_good`, raises StoreError if the log could not be emptied."""
    query = store.database.query
    store.database.check_rows()  # else damaged rows would be reindexed, and seem undamaged
    query("VACUUM")
    deadline = time.monotonic() + (BUSY if for_good else READER)
    query(f"PRAGMA busy_timeout = {int(1000 * min(BUSY, READER))}")
    try:
        # SQLite waits for readers, but not for another process that merges the log.
        while (busy := query("PRAGMA wal_checkpoint(TRUNCATE)")[0][0]) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        query(f"PRAGMA busy_timeout = {int(1000 * BUSY)}")
    if busy and for_good:
        raise StoreError(
            f"{store.path}: the prompts are taken out, but the log beside the file still holds them, because another "
            "process is reading: end that one, and run redact again"
        )


def stats(store: TraceStore) -> dict[str, Any]:
    """Counts and sizes; bytes of the file are what it takes with its log, `first` and `last` are times in ISO 8601."""
    store.flush()
    if store.database.writable:
        store.database.query("PRAGMA wal_checkpoint(PASSIVE)")
    return store.database.read(lambda: _stats(store))


def _stats(store: TraceStore) -> dict[str, Any]:
    query = store.database.query
    count, size, first, last = query("SELECT count(*), sum(length(record)), min(at), max(at) FROM traces")[0]
    files = [store.path.with_name(store.path.name + end) for end in ("", "-wal")]
    on_disk = sum(file.stat().st_size for file in files if file.exists())
    models: dict[str, int] = {}
    for context, traces in query("SELECT context, count(*) FROM traces GROUP BY context"):
        try:
            model = str(store.database.facts(context).get("model", "unknown"))
        except LookupError:
            model = "damaged"
        models[model] = models.get(model, 0) + traces
    return {
        "path": str(store.path),
        "traces": count,
        "file_bytes": on_disk,
        "record_bytes": size or 0,
        "bytes_per_trace": round(on_disk / count, 1) if count else 0.0,
        "record_bytes_per_trace": round((size or 0) / count, 1) if count else 0.0,
        "first": None if first is None else iso(first),
        "last": None if last is None else iso(last),
        "models": models,
        "dictionaries": [number for (number,) in query("SELECT dictionary FROM dictionaries ORDER BY dictionary")],
        "contexts": query("SELECT count(*) FROM contexts WHERE digest <> ?", GONE)[0][0],
    }


def rewrite(
    store: TraceStore,
    names: Iterable[str],
    dictionary: Callable[[], zstandard.ZstdCompressionDict | None],
    change: Callable[[Trace], Trace] = lambda trace: trace,
    if_smaller: bool = False,
) -> tuple[int, int]:
    """Rewrite these traces, changed and with a dictionary; returns how many, and the bytes saved. A record is replaced
    only if it has not changed since it was read; otherwise it is read and changed again, so that nothing another
    process did is lost. Deleted traces are skipped.
    """
    written = saved = 0
    names = iter(names)
    while left := list(islice(names, BATCH)):
        for trial in count(1):
            with nullcontext() if trial <= PATIENCE else store.database.transaction():
                chosen = dictionary()
                changes = []
                for name in left:
                    old = store.database.record(name)
                    if old is None:
                        continue
                    new = change(store.decoded(old))
                    record = encode(new, chosen)
                    if not if_smaller or len(record) < len(old.record):
                        changes.append(Change(old, facts(new.context), record))
                try:
                    done = store.database.replace(changes, chosen) if changes else []
                except Outdated:  # another process has deleted the dictionary
                    continue
            finished = [made for made, replaced in zip(changes, done, strict=True) if replaced]
            written += len(finished)
            saved += sum(len(made.old.record) - len(made.record) for made in finished)
            left = [made.old.request_id for made, replaced in zip(changes, done, strict=True) if not replaced]
            if not left:
                break
    return written, saved
