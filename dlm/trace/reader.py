"""Reads traces from a store by id: finds them, checks them, and adds the text of their tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dlm.errors import UserError
from dlm.trace.codec import CorruptTrace, decode
from dlm.trace.database import FIRST, Database, Row, Stored
from dlm.trace.facts import proof
from dlm.trace.times import ticks
from dlm.trace.trace import Trace

if TYPE_CHECKING:
    from dlm.trace.pieces import Pieces

DEFAULT = "runs/traces.db"
MAX_ID = 2**16  # bytes
NEAR_AMONG = 5000  # newest ids an unknown one is compared with


class UnknownTrace(UserError, KeyError):
    """An id the store does not have."""

    __str__ = UserError.__str__  # KeyError's would put the message in quotes


def default_path() -> Path:
    """DLM_TRACES, else runs/traces.db."""
    return Path(os.environ.get("DLM_TRACES") or DEFAULT)


class TraceReader:
    """The reading half of a store, which loads less; `open_database` is called at the first use."""

    def __init__(self, path: Path, open_database: Callable[[], Database] | None = None) -> None:
        self.path = path
        self._open = open_database or partial(Database, path, create=False)
        self._reader: Database | None = None
        self._pieces: dict[str, Pieces | None] = {}

    @property
    def database(self) -> Database:
        """The connection for reading, opened when first needed."""
        if self._reader is None:
            self._reader = self._open()
        return self._reader

    def close(self) -> None:
        """Let go of the file."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, request_id: str) -> Trace:
        """The trace of an id, checked. Raises UnknownTrace, which names the nearest ids, or CorruptTrace."""
        self._settle()
        found = self.database.record(check_id(request_id))
        if found is None:
            raise UnknownTrace(f"trace {request_id[:60]!r}: {self.path} has none of this id{self._near(request_id)}")
        return self.decoded(found)

    def __contains__(self, request_id: object) -> bool:
        self._settle()
        return isinstance(request_id, str) and self.database.has(check_id(request_id))

    def __len__(self) -> int:
        self._settle()
        return self.database.query("SELECT count(*) FROM traces")[0][0]

    def __iter__(self) -> Iterator[Trace]:
        """All traces, oldest first; those stored meanwhile included."""
        self._settle()
        return map(self.decoded, self.database.records())

    def ls(self, newest: int | None = None) -> list[Row]:
        """What is stored, oldest first; or the `newest` ones, newest first."""
        self._settle()
        return self.database.rows(newest=newest)

    def find(
        self, *, model: str | None = None, since: Any = None, until: Any = None, newest: int | None = None, **facts: Any
    ) -> list[Row]:
        """The rows of traces of a `model` and other shared facts, stored in [since, until).

        A time is a datetime, seconds since 1970, an ISO date, or an age such as "7d", "12h", "30m".
        """
        self._settle()
        criteria = ({} if model is None else {"model": model}) | facts
        start, end = (None if time is None else ticks(time) for time in (since, until))
        start = FIRST if start is None else start
        if not criteria:
            return self.database.rows(start, end, newest)

        def found() -> list[Row]:
            rows = self.database.rows(start, end)
            agree = {context: self._agrees(context, criteria) for context in {row.context for row in rows}}
            return [row for row in rows if agree[row.context]]

        rows = self.database.read(found)
        return rows if newest is None else rows[::-1][:newest]

    def decoded(self, stored: Stored) -> Trace:
        """The trace of a record as the database gave it. Raises CorruptTrace."""
        if stored.damage:
            raise CorruptTrace(f"trace {stored.request_id[:60]!r}: {stored.damage}")
        trace = decode(stored.record, stored.request_id, stored.facts, lambda _: stored.dictionary)
        trace.at, trace.source = stored.at, self.pieces
        return trace

    def pieces(self, tokenizer: str) -> Pieces | None:
        """The text of each token of a tokenizer; None where the store does not have it."""
        if self._pieces.get(tokenizer) is None:
            found = self.database.query("SELECT digest, content FROM pieces WHERE tokenizer = ?", tokenizer)
            if found and not (isinstance(found[0][1], bytes) and proof(found[0][1]) == found[0][0]):
                raise CorruptTrace(f"{self.path}: the pieces of tokenizer {tokenizer} are damaged")
            from dlm.trace.pieces import Pieces

            self._pieces[tokenizer] = Pieces.from_bytes(found[0][1]) if found else None
        return self._pieces[tokenizer]

    def _settle(self) -> None:
        """Called before each read; a store that also writes waits here for its own traces."""

    def _agrees(self, context: int, criteria: Mapping[str, Any]) -> bool:
        try:
            shared = self.database.facts(context)
        except LookupError:
            return False
        return all(shared.get(key) == value for key, value in criteria.items())

    def _near(self, request_id: str) -> str:
        import difflib

        known = [row.request_id for row in self.database.rows(newest=NEAR_AMONG)]
        near = difflib.get_close_matches(request_id[:200], known, n=3, cutoff=0.5)
        if near:
            return f"; the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
        return f"; the newest are {', '.join(known[:3])}" if known else "; it is empty"


def check_id(request_id: str) -> str:
    """The id itself. Any Unicode text up to MAX_ID bytes is one; UserError for others."""
    if not isinstance(request_id, str):
        raise UserError(f"request id {request_id!r}: must be text")
    try:
        size = len(request_id.encode())
    except UnicodeEncodeError:
        raise UserError(f"request id {request_id[:60]!r}: is no Unicode text (half a surrogate pair)") from None
    if size > MAX_ID:
        raise UserError(f"request id {request_id[:60]!r}…: {size} bytes are more than {MAX_ID}")
    return request_id
