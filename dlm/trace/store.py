"""`dlm.TraceStore`: many traces in one file, found by id."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dlm.errors import UserError
from dlm.trace import export, fsck, imports, upkeep
from dlm.trace.connection import Durability
from dlm.trace.database import Database
from dlm.trace.dictionaries import Dictionaries, given, train_dict
from dlm.trace.facts import proof
from dlm.trace.reader import TraceReader, check_id, default_path
from dlm.trace.record import BatchRecorder, Recorder, check_keep
from dlm.trace.redact import Prompts, redacted
from dlm.trace.trace import Trace
from dlm.trace.writer import Writer, taken

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dlm.trace.config import TraceConfig
    from dlm.trace.pieces import Pieces
OnFull = Literal["block", "raise"]
STORES: weakref.WeakSet[TraceStore] = weakref.WeakSet()
"""All open stores of this process; after a fork, each reopens its file in the child."""
INHERITED: list[Database] = []
"""Connections that a forked process has from its parent: neither used nor closed, only kept alive."""


class TraceStore(TraceReader):
    """Traces by id. A thread of the store writes them; reading sees all that was put.

    `durability`: with "trace" a put returns when its trace is on the disk; with "group" several are committed together,
    and `flush`, `close` or the put's future say when; with "none" nobody waits for the disk, so a power cut may cost the
    last seconds. `dictionary` compresses (bytes, or a file; see `train_dict`): False for none, None for the store's
    newest. `keep` is what recorders note beside tokens, `topk` how many of the likeliest tokens, `prompts` what is kept
    of prompts, `fraction` the share of requests that `recorder` records. `overwrite` lets recorders replace traces of the
    same id. `queue_size` traces may wait to be written; a put into a full queue waits, or raises with on_full="raise".
    """

    def __init__(
        self,
        path: str | Path | None = None,
        durability: Durability = "group",
        dictionary: bytes | str | Path | Literal[False] | None = None,
        *,
        keep: Collection[str] = (),
        topk: int = 4,
        fraction: float = 1.0,
        prompts: Prompts = "plain",
        queue_size: int = 1024,
        on_full: OnFull = "block",
        overwrite: bool = False,
        create: bool = True,
    ) -> None:
        words = {"durability": (durability, Durability), "prompts": (prompts, Prompts), "on_full": (on_full, OnFull)}
        for name, (value, known) in words.items():
            if value not in get_args(known):
                raise UserError(f"{name} = {value!r}: expected {', '.join(get_args(known))}")
        if not 0 <= fraction <= 1:
            raise UserError(f"fraction = {fraction}: must be from 0 to 1")
        for name, value in (("queue_size", queue_size), ("topk", topk)):
            if value < 1:
                raise UserError(f"{name} = {value}: must be at least 1")
        file, chosen = default_path() if path is None else Path(path), given(dictionary)

        opened = partial(Database, file, durability, create)
        super().__init__(file, opened)
        self.dictionaries = Dictionaries(chosen)
        self.durability: Durability = durability
        self.keep, self.topk, self.fraction, self.overwrite = check_keep(keep), topk, fraction, overwrite
        # The writer must not hold the store, which would then never be collected; so it has dictionaries of its own.
        self._writer = Writer(
            opened, lambda trace: redacted(trace, prompts), Dictionaries(chosen).to_write_with, queue_size, on_full
        )
        self._finalizer = weakref.finalize(self, self._writer.close)  # at the latest when Python exits
        STORES.add(self)
        self.database  # noqa: B018 a wrong path is an error here, not at the first trace

    @classmethod
    def of(cls, config: TraceConfig) -> TraceStore:
        """The store that a config describes."""
        options = config.model_dump(exclude={"enabled", "store", "keep"})
        return cls(config.store, keep=config.keep.split("+"), **options)

    def record(
        self,
        request_id: str,
        prompt: Any = (),
        meta: Mapping[str, Any] | None = None,
        *,
        mask_id: int | None = None,
        context: Mapping[str, Any] | None = None,
        keep: Collection[str] | None = None,
        overwrite: bool = False,
    ) -> BatchRecorder:
        """Record any denoising loop: `with store.record(id, prompt=ids) as rec: rec.step(canvas)`.

        `prompt` is what stands before the loop: ids, or the whole canvas with its masks. Without `mask_id` the mask is
        the token that positions change from. `meta` are facts of this request, `context` those of many, which are stored once.
        """
        self._refuse_taken(request_id, overwrite)
        facts = {"mask_id": mask_id, "meta": meta, "context": context, "keep": keep, "overwrite": overwrite}
        return BatchRecorder(partial(self._recorder, **facts), request_id, prompt)

    def recorder(
        self,
        request_id: str,
        prompt: Any = (),
        *,
        mask_id: int | None,
        length: int | None = None,
        meta: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
        keep: Collection[str] | None = None,
        overwrite: bool = False,
    ) -> Recorder | None:
        """A recorder for an engine to drive, or None where `fraction` leaves this request out."""
        if not self.wants(request_id):
            return None
        overwrite = overwrite or self.overwrite
        self._refuse_taken(request_id, overwrite)
        facts = {"mask_id": mask_id, "length": length, "meta": meta, "context": context}
        return self._recorder(request_id, prompt, keep, overwrite, **facts)

    def wants(self, request_id: str) -> bool:
        """Whether `fraction` includes this request: decided by its id, so the same everywhere."""
        if self.fraction >= 1:
            return True
        draw = blake2b(check_id(request_id).encode(), digest_size=8).digest()
        return int.from_bytes(draw, "little") < self.fraction * 2**64

    def put(self, trace: Trace | Recorder, overwrite: bool = False) -> Future[None]:
        """Store a trace. The future is done when it is on the disk; with durability="trace" it is on return."""
        check_id(trace.request_id)
        done = self._writer.put(trace, overwrite, awaited=self.durability == "trace")
        if self.durability == "trace":
            done.result()
        return done

    def flush(self) -> None:
        """Wait until all that was put is on the disk; raises what went wrong since the last time."""
        self._writer.flush()

    def close(self) -> None:
        """Flush, and let go of the file. What was put is on the disk when this returns, or it raises."""
        try:
            self._writer.close()
        finally:
            self._finalizer.detach()
            super().close()

    def add_tokenizer(self, tokenizer: str, content: str) -> None:
        """`add_pieces` from the content of a tokenizer.json."""
        from dlm.trace.pieces import Pieces

        if self.pieces(tokenizer) is None:
            self.add_pieces(tokenizer, Pieces.of_tokenizer(content))

    def add_pieces(self, tokenizer: str, pieces: Pieces) -> None:
        """Keep the text of tokens, once for all traces whose facts name this `tokenizer` (its digest)."""
        if self.pieces(tokenizer) is None:
            data = pieces.to_bytes()
            query = "INSERT INTO pieces VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
            with self.database.transaction():
                self.database.query(query, tokenizer, proof(data), data)
            self._pieces[tokenizer] = pieces

    gc = upkeep.gc
    fsck = fsck.fsck
    redact = upkeep.redact
    train_dict = train_dict
    recompress = upkeep.recompress
    stats = upkeep.stats
    to_dataset, export = export.to_dataset, export.export
    import_ = imports.import_

    def __repr__(self) -> str:
        return f"TraceStore({str(self.path)!r}, durability={self.durability!r})"

    def _recorder(
        self, name: str, prompt: Any, keep: Collection[str] | None, overwrite: bool, **facts: Any
    ) -> Recorder:
        keep, deliver = self.keep if keep is None else keep, partial(self.put, overwrite=overwrite)
        return Recorder(name, prompt, keep=keep, topk=self.topk, deliver=deliver, **facts)

    def _refuse_taken(self, request_id: str, overwrite: bool) -> None:
        """Refuse an id that is taken, before the work is done."""
        if not overwrite and (request_id in self._writer.underway or self.database.has(check_id(request_id))):
            raise taken(request_id)

    def _settle(self) -> None:
        if self._writer.unfinished:
            self._writer.settle()

    def _forget(self) -> None:
        """In a forked process: leave the parent's connection alone."""
        if self._reader is not None:
            INHERITED.append(self._reader)
            self._reader = None
        self._writer.reset()


def _after_fork() -> None:
    for store in STORES:
        store._forget()


os.register_at_fork(after_in_child=_after_fork)
