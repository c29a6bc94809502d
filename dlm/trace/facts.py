"""Digests that prove a trace unchanged: of its canvases, of its facts (tables as JSON), and of all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Int32
    from numpy import ndarray

    from dlm.trace.trace import Trace

DIGEST = 16  # bytes


def proof(data: bytes) -> bytes:
    """BLAKE2b-128 of some bytes."""
    return blake2b(data, digest_size=DIGEST).digest()


class Facts(Mapping[str, Any]):
    """A table as the JSON it was read from, parsed on first use."""

    def __init__(self, data: bytes) -> None:
        self.json = data

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Facts:
        """The table with its JSON, which is made only once."""
        return table if isinstance(table, cls) else cls(facts(table))

    @cached_property
    def digest(self) -> bytes:
        return proof(self.json)

    @cached_property
    def table(self) -> dict[str, Any]:
        try:
            table = json.loads(self.json) if self.json else {}
        except (ValueError, RecursionError) as error:
            raise UserError(f"facts of a trace are no JSON: {error}") from None
        if not isinstance(table, dict):
            raise UserError("facts of a trace are no table")
        return table

    def __getitem__(self, key: str) -> Any:
        return self.table[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        return repr(self.table)


def facts(table: Mapping[str, Any]) -> bytes:
    """A table as JSON, the same bytes for equal tables; empty for an empty one."""
    if isinstance(table, Facts):
        return table.json
    if not table:
        return b""
    try:
        text = json.dumps(table, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise UserError(f"meta of a trace must be JSON: {error}") from None
    return text.encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    """numpy's and torch's numbers and arrays as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not")


def digest_of(canvas: Int32[ndarray, " l"]) -> bytes:
    """A digest of eight bytes of a canvas."""
    return blake2b(np.ascontiguousarray(canvas, "<i4").tobytes(), digest_size=8).digest()


def digest(trace: Trace) -> bytes:
    """BLAKE2b-128 of a trace's content; the same for every form it is stored in."""
    later, name, own = trace.later, trace.request_id.encode(), facts(trace.own)
    options = [trace.accepted, trace.confidence, trace.topk_tokens, trace.topk_logits]
    options = [option for option in options if option is not None]
    shapes = [(option.dtype.str, option.shape) for option in options] if options else ""
    m, g = len(later.step), len(trace.growth)
    sizes = f"({len(name)}, {len(own)}, {m}, {g}, {len(trace.digests)})"
    head = f"{trace.mask_id} {trace.num_steps} {len(trace.first_step)} {sizes}{shapes}"
    start = b"".join((head.encode(), name, own, Facts.of(trace.context).digest, trace.digests))
    total = blake2b(start, digest_size=DIGEST)
    growth = (trace.growth,) if g else ()
    for column in (trace.first_step, trace.first_token, *(later if m else ()), *growth, *options):
        total.update(column.data)
    return total.digest()
