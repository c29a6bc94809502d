"""Traces as Parquet, for training and for other tools. pyarrow and fsspec are imported on demand.

One row is a trace. Folders are days, `day=2025-06-30/`; a file's name is the time span of its traces, so that a later
export goes on where an earlier one ended. `datasets.load_dataset("parquet", data_files=…)` reads it as it is.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.errors import UserError
from dlm.trace.events import GIVEN, NEVER
from dlm.trace.facts import digest, facts
from dlm.trace.times import when
from dlm.trace.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from dlm.trace.store import TraceStore

ROWS = 10_000  # traces a file holds
EVENT = ("step", "position", "kind", "token")
NAME = re.compile(r"(\d{16})-(\d{16})\.parquet$")


def export(store: TraceStore, url: str, rows: int = ROWS) -> int:
    """Write the traces that are not at `url` yet; returns how many. A file appears whole or not at all. Traces that
    were overwritten since are exported again; those deleted from the store stay there.
    """
    if rows < 1:
        raise UserError(f"rows = {rows}: must be at least 1")
    store.flush()
    fs, root = file_system(url)
    import pyarrow.parquet as pq
    from fsspec.implementations.local import LocalFileSystem

    after = max((int(found[2]) for path in listed(fs, root) if (found := NAME.search(path))), default=-1)
    written = 0
    records = store.database.records(after)
    for day, of_day in groupby(records, key=lambda stored: _day(stored.at)):
        while some := list(islice(of_day, rows)):
            folder = f"{root}/day={day}"
            fs.makedirs(folder, exist_ok=True)
            final = f"{folder}/{some[0].at:016d}-{some[-1].at:016d}.parquet"
            # Object stores show a file only when it is whole; in a file system a rename does that.
            temporary = f"{folder}/.{uuid.uuid4().hex}.tmp" if isinstance(fs, LocalFileSystem) else final
            table = _table(list(map(store.decoded, some)))
            with fs.open(temporary, "wb") as file:
                pq.write_table(table, file, compression="zstd")
            if temporary != final:
                fs.mv(temporary, final)
            written += len(some)
    return written


def to_dataset(store: TraceStore, **criteria: Any) -> Dataset:
    """The traces found by `find`, as a `datasets.Dataset` with the columns of `export`."""
    from datasets import Dataset

    rows = store.find(**criteria)
    return Dataset(_table([store[row.request_id] for row in rows]))


def row(trace: Trace) -> dict[str, Any]:
    """One trace as plain columns.

    `tokens` is the canvas at the end, `steps` the step each token was committed at, -1 if given or never: what
    trajectory training reads. Where tokens were revised, the first ones and the later events stand beside.
    """
    revised = len(trace.later) > 0
    confidence = trace.confidence
    return {
        "request_id": trace.request_id,
        "stored": when(trace.at),
        "model": trace.meta.get("model") if isinstance(trace.meta.get("model"), str) else None,
        "mask_id": trace.mask_id,
        "num_steps": trace.num_steps,
        "prompt_length": trace.prompt_length,
        "tokens": trace.tokens,
        "steps": trace.steps,
        "given": trace.first_step == GIVEN,
        "first_tokens": trace.first_token if revised else None,
        "first_steps": np.where(trace.first_step == NEVER, trace.num_steps, trace.first_step) if revised else None,
        "later": [dict(zip(EVENT, row, strict=True)) for row in np.stack(list(trace.later), axis=1).tolist()],
        "growth": trace.growth.ravel().tolist(),
        "accepted": trace.accepted,
        "confidence": None if confidence is None else confidence.astype(np.float32),
        "topk": 0 if trace.topk_tokens is None else trace.topk_tokens.shape[1],
        "topk_tokens": None if trace.topk_tokens is None else trace.topk_tokens.ravel(),
        "topk_logits": None if trace.topk_logits is None else trace.topk_logits.ravel().astype(np.float32),
        "digests": trace.digests,
        "own": facts(trace.own).decode("utf-8", "surrogatepass"),
        "context": facts(trace.context).decode("utf-8", "surrogatepass"),
        "digest": digest(trace),
    }


def schema() -> pa.Schema:
    """The columns' types."""
    import pyarrow as pa

    event = {"step": pa.int32(), "position": pa.int32(), "kind": pa.int8(), "token": pa.int32()}
    kinds = {
        pa.string(): ("request_id", "model", "own", "context"),
        pa.timestamp("us", "UTC"): ("stored",),
        pa.int32(): ("mask_id", "num_steps", "prompt_length", "topk"),
        pa.list_(pa.int32()): ("tokens", "steps", "first_tokens", "first_steps", "growth", "topk_tokens"),
        pa.list_(pa.bool_()): ("given", "accepted"),
        pa.list_(pa.float32()): ("confidence", "topk_logits"),
        pa.list_(pa.struct(event)): ("later",),
        pa.binary(): ("digests", "digest"),
    }
    return pa.schema([(name, kind) for kind, names in kinds.items() for name in names])


def _table(traces: Sequence[Trace]) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pylist([row(trace) for trace in traces], schema=schema())


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    import fsspec

    try:
        fs, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    return fs, path.rstrip("/")


def listed(fs: Any, root: str) -> Iterator[str]:
    """The files below a folder, or the one file, in order of name."""
    if fs.isfile(root):
        yield root
    elif fs.exists(root):
        yield from sorted(path for path in fs.find(root) if not path.rsplit("/", 1)[-1].startswith("."))


def _day(at: int) -> str:
    return when(at).strftime("%Y-%m-%d")
