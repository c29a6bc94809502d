"""The result of a measurement: plain values and tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Say = Callable[[str], None]
"""Shows progress, a line at a time."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings: `headings` maps keys of the rows to what stands above them, and gives their order."""

    title: str
    headings: Mapping[str, str]
    rows: list[dict[str, Any]]
    text: str = ""
    """What a reader must know of it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`values` are merged into the report's top level; `notes` are lines printed under the tables."""

    values: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
