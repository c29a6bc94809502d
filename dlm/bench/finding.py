"""The result of a measurement: plain values, tables, and points of a plot."""

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
class Point:
    """One way of decoding: how many tokens a forward pass, and how good."""

    panel: str
    """The row of axes it belongs to: a task and its measure of quality."""
    facet: str
    """The axes of that row: a strategy."""
    series: str
    """Drawn in one colour: a rule."""
    kind: str
    """Drawn with one marker: a cache. Points of a facet that are alike in series and kind are joined by a line."""
    label: str
    """The rule's settings in words."""
    tpf: float
    quality: float
    low: float
    high: float
    """Where chance may have moved it, at 95 %."""
    rises: bool = True
    """Whether more is better."""

    def as_good_as(self, other: "Point") -> bool:
        return self.quality >= other.quality if self.rises else self.quality <= other.quality


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`values` are merged into the report's top level; `notes` are lines printed under the tables."""

    values: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
