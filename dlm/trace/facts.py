"""Tables of facts about requests, as JSON with a digest."""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any

from dlm.errors import UserError

DIGEST = 16  # bytes


def proof(data: bytes) -> bytes:
    """BLAKE2b-128 of some bytes."""
    return blake2b(data, digest_size=DIGEST).digest()


class Facts(Mapping[str, Any]):
    """A table as the JSON it was read from, parsed on first use."""

    def __init__(self, data: bytes) -> None:
        self.json = data

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Facts":
        """The same table, as JSON once and for all."""
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


def facts_digest(table: Mapping[str, Any]) -> bytes:
    """BLAKE2b-128 of a table's JSON."""
    if isinstance(table, Facts):
        return table.digest
    return proof(facts(table))


def _plain(value: Any) -> Any:
    """numpy's and torch's numbers and arrays as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not")
