"""Records replaced by others of the same trace while other processes write too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import count, islice
from typing import TYPE_CHECKING

from dlm.trace.codec import encode
from dlm.trace.database import Outdated
from dlm.trace.facts import facts
from dlm.trace.stored import Change
from dlm.trace.trace import Trace

if TYPE_CHECKING:
    import zstandard

    from dlm.trace.store import TraceStore

BATCH = 256  # records replaced in one commit
PATIENCE = 3  # trials before nobody else may write meanwhile


def rewrite(
    store: TraceStore,
    names: Iterable[str],
    change: Callable[[Trace], Trace],
    dictionary: Callable[[], zstandard.ZstdCompressionDict | None],
    if_smaller: bool = False,
) -> tuple[int, int]:
    """Write these traces anew, changed and with a dictionary; how many were written, and the bytes that saved.

    A record is replaced only if it is the one that was read. Where another process was faster, it is read again: so
    what that did is kept, and this is done to it too. Traces that are gone are left out.
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
