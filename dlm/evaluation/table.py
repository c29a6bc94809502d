"""Rows of results as a Markdown table."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None) -> str:
    """A table of `rows`; `columns` maps keys to headings and gives their order (default: the first row's keys).

    Columns that hold anything but text are aligned right. A missing or None cell is a dash.
    """
    if not rows:
        return "*nothing measured*"
    columns = columns or {key: key for key in rows[0]}
    cells = [[_cell(row.get(key)) for key in columns] for row in rows]
    right = [not any(isinstance(row.get(key), str) for row in rows) for key in columns]
    heads = list(columns.values())
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    rules = ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right, strict=True)]
    return "\n".join(_line(line, widths, right) for line in [heads, rules, *cells])


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
    return "| " + " | ".join(padded) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
