"""Traces as training data: the texts that were decoded, and the step at which each token was committed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from dlm.data.config import DataConfig
from dlm.data.documents import Document
from dlm.data.local import find_files, split_paths
from dlm.data.split import Split
from dlm.data.table import TokenTable
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError
from dlm.trace.events import GIVEN, REDACTED, REPLACE
from dlm.trace.trace import Trace

PATTERNS = ("*.db", "*.parquet", "*.jsonl")


def trace_table(config: DataConfig, tokenizer: Tokenizer, split: str) -> TokenTable:
    """The traces of a split in the order of their ids, so that it does not matter when each was stored."""
    found = []
    for where, trace in _traces(config, tokenizer, split):
        if config.trace_model not in (None, trace.meta.get("model")):
            continue
        document = document_of(trace)
        if document is None:
            continue
        _check(trace, document, tokenizer, where)
        found.append((trace.request_id, _key(trace, document), document))
    found.sort(key=lambda entry: entry[0])
    side = Split.of(config, ((key, key) for _, key, _ in found))
    taken = (document for _, key, document in found if side.takes(key, key, split))
    return TokenTable.of(taken, tokenizer.vocab_size)


def document_of(trace: Trace) -> Document | None:
    """Its final canvas, up to the first position that was never filled; None where nothing was generated before that.

    It includes what a decoder wrote behind end-of-text in the same block, which the tokens before it attended to.
    """
    empty = np.flatnonzero(trace.tokens == trace.mask_id)
    kept = slice(0, empty[0] if len(empty) else trace.length)
    order = committed(trace)[kept]
    return Document(trace.tokens[kept], order == GIVEN, order) if (order != GIVEN).any() else None


def committed(trace: Trace) -> Int32[ndarray, " l"]:
    """The step, from 0, that gave each position its last token; -1 for given positions and remaining masks."""
    order = trace.steps.copy()
    edits = trace.later.kind == REPLACE
    np.maximum.at(order, trace.later.position[edits], trace.later.step[edits])
    return order


def _traces(config: DataConfig, tokenizer: Tokenizer, split: str) -> Iterator[tuple[Path, Trace]]:
    paths, field = split_paths(config, split)
    for path in find_files(paths, PATTERNS, field):
        if path.suffix == ".db":
            from dlm.trace.store import TraceStore

            with TraceStore(path, create=False) as store:
                yield from ((path, trace) for trace in store)
            continue
        from dlm.trace.export import file_system
        from dlm.trace.imports import READERS

        if path.suffix[1:] not in READERS:
            raise UserError(f"data.{field}: {path} is no store of traces: expected {', '.join(PATTERNS)}")
        system, name = file_system(str(path))
        yield from ((path, trace) for trace in READERS[path.suffix[1:]](system, name, tokenizer.mask_token_id))


def _key(trace: Trace, document: Document) -> str:
    """What decides the split: the prompt, so that all answers to it are in the same split; without a prompt, the id."""
    given = document.ids[document.prompt]
    return str(given.tolist()) if len(given) else trace.request_id


def _check(trace: Trace, document: Document, tokenizer: Tokenizer, where: Path) -> None:
    """Refuse traces of another tokenizer, without their prompt, or with ids that the tokenizer lacks."""
    name = f"{where}: trace {trace.request_id[:60]!r}"
    made_with, model = trace.meta.get("tokenizer"), trace.meta.get("model")
    if made_with not in (None, tokenizer.fingerprint):
        raise UserError(
            f"{name} was recorded with another tokenizer ({made_with}, of model {model!r}) than this run's "
            f"({tokenizer.fingerprint}): train with that one, or name one model's traces with data.trace_model"
        )
    if (document.ids == REDACTED).any():
        raise UserError(f'{name} was stored without its prompt: record with trace.prompts = "plain" to train on traces')
    if document.ids.min() < 0 or document.ids.max() >= tokenizer.vocab_size:
        raise UserError(
            f"{name} holds token {document.ids.max()}, and the tokenizer has {tokenizer.vocab_size} tokens: "
            "train with the tokenizer it was recorded with"
        )
