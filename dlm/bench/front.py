"""Which points no other beats, and how fast two strategies are at equal quality."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from dlm.bench.finding import Point, Table

HEADINGS = {
    "panel": "quality",
    "kind": "cache",
    "block": "block, TPF",
    "block_way": "by",
    "block_quality": "quality",
    "multi_block": "multi_block, TPF",
    "multi_block_way": "by",
    "multi_block_quality": "quality",
    "ratio": "TPF ratio",
}


def front(points: Sequence[Point]) -> list[Point]:
    """The points of one panel that no other equals in both TPF and quality and exceeds in one; by falling TPF."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.tpf, -p.quality if p.rises else p.quality)):
        if not best or not best[-1].as_good_as(point):
            best.append(point)
    return best


def equal_quality(points: Sequence[Point]) -> Table | None:
    """Single block's front, and the fastest that multi-block was while no worse; None where one of them is missing."""
    panels, kinds = (dict.fromkeys(getattr(p, name) for p in points) for name in ("panel", "kind"))
    rows = [row for panel, kind in product(panels, kinds) for row in _pairs(_of(points, panel, kind))]
    if not rows:
        return None
    text = (
        "Each line is a point of single block's Pareto front; beside it, the fastest of multi-block's that is no worse."
    )
    return Table(title="Multi-block against single block at equal quality", headings=HEADINGS, rows=rows, text=text)


def _of(points: Sequence[Point], panel: str, kind: str) -> dict[str, list[Point]]:
    """Facet -> its points in that panel, of that kind."""
    own = [p for p in points if (p.panel, p.kind) == (panel, kind)]
    return {facet: [p for p in own if p.facet == facet] for facet in ("block", "multi_block")}


def _pairs(facets: dict[str, list[Point]]) -> Iterator[dict[str, Any]]:
    if not all(facets.values()):
        return
    for single in reversed(front(facets["block"])):
        rivals = [p for p in facets["multi_block"] if p.as_good_as(single)]
        multi = max(rivals, key=lambda p: p.tpf, default=None)
        row: dict[str, Any] = {"panel": single.panel, "kind": single.kind}
        for point in (single, multi):
            if point is not None:
                row |= {
                    point.facet: point.tpf,
                    f"{point.facet}_way": point.label,
                    f"{point.facet}_quality": point.quality,
                }
        yield row | ({"ratio": round(multi.tpf / single.tpf, 3)} if multi else {})
