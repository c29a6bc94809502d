"""A thread that builds, encodes and commits traces."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dlm.errors import UserError
from dlm.trace.codec import encode
from dlm.trace.database import Database, Entry, Outdated
from dlm.trace.facts import Facts, facts
from dlm.trace.record import Recorder
from dlm.trace.session import StoreError
from dlm.trace.trace import Trace

if TYPE_CHECKING:
    from concurrent.futures import Future

    import zstandard

BATCH = 256  # traces in one commit, at most


class DuplicateTrace(UserError):
    """A trace whose id the store has already."""


@dataclass(frozen=True, eq=False)
class Task:
    """A trace on its way to the disk."""

    source: Trace | Recorder
    overwrite: bool
    done: Future[None]
    awaited: bool
    """Whether the caller waits for `done`, and so sees its error."""


class Writer:
    """A bounded queue and the thread that empties it; `put` waits while the queue is full. All traces that wait when a
    commit ends are committed together, so a slow disk makes larger groups.
    """

    def __init__(
        self,
        open_database: Callable[[], Database],
        prepare: Callable[[Trace], Trace],
        dictionary: Callable[[Database], zstandard.ZstdCompressionDict | None],
        queue_size: int,
        on_full: Literal["block", "raise"],
    ) -> None:
        self.open_database, self.prepare, self.dictionary = open_database, prepare, dictionary
        self.queue_size, self.on_full = queue_size, on_full
        self.reset()

    def reset(self) -> None:
        """Start with an empty queue: in a forked process, queued traces are the parent's to write."""
        self.process = os.getpid()
        self.changed = threading.Condition()
        self.queue: deque[Task] = deque()
        self.underway: set[str] = set()
        self.unfinished = 0
        self.errors: list[Exception] = []
        self.thread: threading.Thread | None = None
        self.closing = False

    def put(self, source: Trace | Recorder, overwrite: bool, awaited: bool) -> Future[None]:
        """Queue a trace. The future is done when it is committed."""
        from concurrent.futures import Future  # imports logging, which readers do not need

        if self.process != os.getpid():
            self.reset()
        task = Task(source, overwrite, Future(), awaited)
        task.done.set_running_or_notify_cancel()  # an accepted trace will be stored: it can no longer be cancelled
        with self.changed:
            if self.on_full == "raise" and len(self.queue) >= self.queue_size:
                raise StoreError(f"trace {source.request_id[:60]!r}: {self.queue_size} traces wait to be written")
            self.changed.wait_for(lambda: self.closing or len(self.queue) < self.queue_size)
            if self.closing:
                raise UserError(f"trace {source.request_id[:60]!r}: the store is closed")
            self.queue.append(task)
            self.underway.add(source.request_id)
            self.unfinished += 1
            self._start()
            self.changed.notify_all()
        return task.done

    def flush(self) -> None:
        """Wait until all that was put is committed; raise what went wrong since the last time."""
        self.settle()
        with self.changed:
            errors, self.errors = self.errors, []
        if errors:
            more = "" if len(errors) == 1 else f" (and {len(errors) - 1} more traces were not stored)"
            raise type(errors[0])(f"{errors[0]}{more}") if isinstance(errors[0], UserError) else errors[0]

    def settle(self) -> None:
        """Wait until nothing is under way."""
        if self.process != os.getpid():
            self.reset()
        with self.changed:
            self.changed.wait_for(lambda: self.unfinished == 0)

    def close(self) -> None:
        """Write all that was put, and end the thread."""
        if self.process != os.getpid():
            return
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.flush()

    def _start(self) -> None:
        if self.thread is None:
            # A daemon: Python joins other threads before it runs the exit handlers, one of which is our close().
            self.thread = threading.Thread(target=self._run, name="dlm-trace-writer", daemon=True)
            self.thread.start()

    def _run(self) -> None:
        database: Database | None = None
        while tasks := self._next():
            try:
                database = database or self.open_database()
            except Exception as error:  # whatever it is, those who wait must get it
                self._finish(tasks, error)
                continue
            self._write(database, tasks)
        if database is not None:
            database.close()

    def _next(self) -> list[Task]:
        """The waiting tasks, once there are any; none when the store closes."""
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.closing)
            tasks = [self.queue.popleft() for _ in range(min(BATCH, len(self.queue)))]
            self.changed.notify_all()
            return tasks

    def _write(self, database: Database, tasks: list[Task]) -> None:
        """Encode and commit; a trace that cannot be encoded does not keep the others from the disk."""
        traces, entries, encoded = list[Trace](), list[Entry](), list[Task]()
        try:
            dictionary = self.dictionary(database)
        except Exception as error:
            self._finish(tasks, error)
            return
        for task in tasks:
            try:
                trace = self.prepare(task.source.trace() if isinstance(task.source, Recorder) else task.source)
                trace = replace(trace, context=Facts.of(trace.context))
                record = encode(trace, dictionary)
                entries.append(Entry(trace.request_id, facts(trace.context), record, task.overwrite))
                traces.append(trace)
                encoded.append(task)
            except Exception as error:  # raised for whoever put it, without ending this thread
                self._finish([task], error)
        if not entries:
            return
        try:
            stored = self._insert(database, traces, entries, dictionary)
        except Exception as error:
            self._finish(encoded, error)
            return
        self._finish([task for task, new in zip(encoded, stored, strict=True) if new], None)
        for task, new in zip(encoded, stored, strict=True):
            if not new:
                self._finish([task], taken(task.source.request_id))

    def _insert(
        self,
        database: Database,
        traces: list[Trace],
        entries: list[Entry],
        dictionary: zstandard.ZstdCompressionDict | None,
    ) -> list[bool]:
        """Commit. Where another process has deleted the dictionary since, encode again, with one that nobody can delete."""
        try:
            return database.insert(entries, dictionary)
        except Outdated:
            with database.transaction():
                dictionary = self.dictionary(database)
                records = [encode(trace, dictionary) for trace in traces]
                entries = [entry._replace(record=record) for entry, record in zip(entries, records, strict=True)]
                return database.insert(entries, dictionary, keep=True)

    def _finish(self, tasks: list[Task], error: Exception | None) -> None:
        with self.changed:
            for task in tasks:
                self.unfinished -= 1
                self.underway.discard(task.source.request_id)
                if error is not None and not task.awaited:
                    self.errors.append(error)
            self.changed.notify_all()
        for task in tasks:
            if error is None:
                task.done.set_result(None)
            else:
                task.done.set_exception(error)


def taken(request_id: str) -> DuplicateTrace:
    return DuplicateTrace(
        f"trace {request_id[:60]!r}: the store has one of this id; give another id, or replace it: overwrite=True of "
        "TraceStore or put, --trace.overwrite of dlm-infer, --overwrite of dlm-replay and dlm-trace import"
    )
