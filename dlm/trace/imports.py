"""Imports traces: from our own Parquet, and from JSON lines in d3LLM's style."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.errors import UserError
from dlm.trace.assemble import from_map, from_states
from dlm.trace.events import GIVEN, NEVER, NO_GROWTH, Later
from dlm.trace.export import EVENT, file_system, listed
from dlm.trace.facts import Facts, digest
from dlm.trace.trace import Trace

if TYPE_CHECKING:
    from dlm.trace.store import TraceStore


def import_(store: TraceStore, url: str, mask_id: int | None = None, overwrite: bool = False) -> int:
    """Import the Parquet or JSON lines at `url`, a file or a folder; returns how many traces. Duplicates are imported
    once: two exports to one folder at the same moment may write the same traces.
    """
    fs, root = file_system(url)
    seen: set[bytes] = set()
    for path in listed(fs, root):
        end = path.rsplit(".", 1)[-1]
        if end not in READERS:
            continue
        for trace in READERS[end](fs, path, mask_id):
            if (proof := digest(trace)) not in seen:
                seen.add(proof)
                store.put(trace, overwrite)
    if not seen:
        raise UserError(f"{url}: no traces there; expected {', '.join('*.' + end for end in READERS)}")
    store.flush()
    return len(seen)


def _parquet(fs: Any, path: str, mask_id: int | None) -> Iterator[Trace]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with fs.open(path, "rb") as file:
        try:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
                for number, row in enumerate(batch.to_pylist()):
                    yield from_row(row, f"{path} row {number}")
        except pa.ArrowInvalid as error:
            raise UserError(f"{path}: not a Parquet file of traces: {error}") from None


def from_row(row: dict[str, Any], where: str) -> Trace:
    """The trace of one exported row; refused where its digest is not the one it had."""
    try:
        trace = _from_row(row)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not a row of exported traces: {error!r}") from None
    if digest(trace) != row["digest"]:
        raise UserError(f"{where}: trace {trace.request_id[:60]!r} is not what was exported: its digest is another")
    return trace


def _from_row(row: dict[str, Any]) -> Trace:
    first_step = _ints(row["steps"] if row["first_steps"] is None else row["first_steps"])
    first_token = _ints(row["tokens"] if row["first_tokens"] is None else row["first_tokens"])
    given = np.array(row["given"], bool)
    absent = ~given & ((first_step < 0) | (first_step == row["num_steps"]))
    first_step = np.where(absent, np.int32(NEVER), np.where(given, np.int32(GIVEN), first_step))
    later = Later(**{name: _ints([event[name] for event in row["later"]]) for name in EVENT})
    k = row["topk"]
    same: dict[str, Any] = {name: row[name] for name in ("request_id", "mask_id", "num_steps", "digests")}
    facts: dict[str, Any] = {name: Facts(row[name].encode("utf-8", "surrogatepass")) for name in ("own", "context")}
    return Trace(
        first_step=first_step,
        first_token=first_token,
        later=later,
        growth=_ints(row["growth"]).reshape(-1, 2) if row["growth"] else NO_GROWTH,
        accepted=None if row["accepted"] is None else np.array(row["accepted"], bool),
        confidence=None if row["confidence"] is None else np.array(row["confidence"], np.float16),
        topk_tokens=_ints(row["topk_tokens"]).reshape(-1, k) if k else None,
        topk_logits=np.array(row["topk_logits"], np.float16).reshape(-1, k) if k else None,
        **same,
        **facts,
    )


def _json_lines(fs: Any, path: str, mask_id: int | None) -> Iterator[Trace]:
    with fs.open(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield from_line(line, f"{path} line {number}", mask_id)


def from_line(line: str, where: str, mask_id: int | None = None) -> Trace:
    """One object of d3LLM's kind: {idx, prompt_ids, trajectory | step_map, nfe}.

    `trajectory` is the canvases, of the whole or of the answer alone, the first with or without a step done;
    `step_map` is the step, from 0, of each token of the answer, which is then under `token_ids` or `final_ids`.
    """
    try:
        entry = json.loads(line)
        prompt = [int(token) for token in entry["prompt_ids"]]
        name = str(entry.get("request_id", entry.get("idx")))
        mask = entry.get("mask_id", mask_id)
        own = {key: entry[key] for key in ("idx", "nfe") if key in entry}
        if "trajectory" in entry:
            return _of_trajectory(name, prompt, entry["trajectory"], mask, own)
        answer = next(entry[key] for key in ("token_ids", "final_ids", "response_ids") if key in entry)
        tokens, steps = [*prompt, *answer], [GIVEN] * len(prompt) + list(entry["step_map"])
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        expected = "expected prompt_ids with trajectory, or with step_map and token_ids"
        raise UserError(f"{where}: not a trajectory: {error!r}; {expected}") from None
    return from_map(name, _ints(tokens), _ints(steps), mask, own=own)


def _of_trajectory(
    name: str, prompt: list[int], trajectory: list[list[int]], mask: int | None, own: dict[str, Any]
) -> Trace:
    whole = trajectory[0][: len(prompt)] == prompt
    states = [_ints(state if whole else [*prompt, *state]) for state in trajectory]
    if mask is not None and (states[0][len(prompt) :] != mask).any():
        states.insert(0, np.concatenate((_ints(prompt), np.full(len(states[0]) - len(prompt), mask, np.int32))))
    return from_states(name, states, mask, own=own)


def _ints(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


READERS = {"parquet": _parquet, "jsonl": _json_lines}
