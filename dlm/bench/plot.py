"""Quality against tokens a forward pass, drawn: a row a measure of quality, a column a strategy."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from dlm.atomic import replacing
from dlm.bench.finding import Point
from dlm.bench.front import front
from dlm.errors import UserError

MARKERS, LINES = "os^Dv", ("-", "--", ":", "-.")
OVERVIEW = "Pareto fronts"


def draw(points: Sequence[Point], file: Path) -> None:
    """All points; the first column has the fronts of every facet and kind over all points in grey."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "the plot needs matplotlib: pip install 'dlm[plot]' (tables and JSON are complete; "
            "--output.no-plot does without)"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels, facets = _names(points, "panel"), _names(points, "facet")
    figure, axes = pyplot.subplots(
        len(panels),
        1 + len(facets),
        figsize=(3.6 + 3.6 * len(facets), max(4.6, 3.5 * len(panels))),  # the legend needs its height
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    styles = _Styles(points, pyplot.get_cmap("tab10"))
    for row, panel in zip(axes, panels, strict=True):
        own = [p for p in points if p.panel == panel]
        _overview(row[0], own, styles)
        for axis, facet in zip(row[1:], facets, strict=True):
            _facet(axis, [p for p in own if p.facet == facet], front(own), styles)
        row[0].set_ylabel(panel)
        row[0].set_xscale("log", base=2)
        row[0].xaxis.set_major_formatter("{x:g}")
        if not own[0].rises:
            row[0].invert_yaxis()  # up is better, everywhere
    for axis, title in zip(axes[0], (OVERVIEW, *facets), strict=True):
        axis.set_title(title)
    for axis in axes[-1]:
        axis.set_xlabel("tokens a forward pass")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    figure.legend(handles=styles.legend(), loc="outside right upper", fontsize=8, frameon=False)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=130, format=file.suffix[1:])
    pyplot.close(figure)


class _Styles:
    """Colours of rules and of strategies, markers and line styles of caches; and the legend that explains them."""

    def __init__(self, points: Sequence[Point], colours: Any) -> None:
        self.series, self.facets, self.kinds = (_names(points, name) for name in ("series", "facet", "kind"))
        self.colour = {name: colours(i % 10) for i, name in enumerate(self.series)}
        self.front = dict(zip(self.facets, ("0.25", "tab:blue", "tab:red", "tab:green"), strict=False))
        self.marker = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(self.kinds)}
        self.line = {name: LINES[i % len(LINES)] for i, name in enumerate(self.kinds)}

    def legend(self) -> list[Any]:
        from matplotlib.lines import Line2D

        def entry(label: str, **style: Any) -> Line2D:
            return Line2D([], [], label=label, **style)

        def heading(label: str) -> Line2D:
            return entry(label, linestyle="none")

        handles = [heading(OVERVIEW), *(entry(name, color=self.front[name], linewidth=2) for name in self.facets)]
        handles += [entry("best of all", color="0.8", linewidth=3), heading(""), heading("Caches")]
        for name in self.kinds:
            handles.append(entry(name, color="0.4", marker=self.marker[name], linestyle=self.line[name], markersize=5))
        handles += [heading(""), heading("Rules")]
        return handles + [entry(name, color=self.colour[name], linewidth=3) for name in self.series]


def _overview(axis: Any, points: Sequence[Point], styles: _Styles) -> None:
    axis.plot([p.tpf for p in points], [p.quality for p in points], ".", color="0.8", markersize=3, zorder=1)
    for facet, kind in product(styles.facets, styles.kinds):
        best = front([p for p in points if (p.facet, p.kind) == (facet, kind)])
        more = {"drawstyle": "steps-post", "markersize": 4, "linewidth": 1.2}
        _bars(axis, best, styles, kind, color=styles.front[facet], **more)


def _facet(axis: Any, points: Sequence[Point], best: Sequence[Point], styles: _Styles) -> None:
    tpf, quality = [p.tpf for p in best], [p.quality for p in best]
    axis.plot(tpf, quality, color="0.8", linewidth=3, drawstyle="steps-post", zorder=1)
    for series, kind in product(styles.series, styles.kinds):
        own = sorted((p for p in points if (p.series, p.kind) == (series, kind)), key=lambda p: p.tpf)
        _bars(axis, own, styles, kind, color=styles.colour[series], markersize=3.5, linewidth=0.8)


def _bars(axis: Any, points: Sequence[Point], styles: _Styles, kind: str, **style: Any) -> None:
    if not points:
        return
    style |= {"linestyle": styles.line[kind], "marker": styles.marker[kind], "elinewidth": 0.6}
    errors = [[p.quality - p.low for p in points], [p.high - p.quality for p in points]]
    *_, bars = axis.errorbar([p.tpf for p in points], [p.quality for p in points], errors, **style)
    for bar in bars:
        bar.set_alpha(0.35)


def _names(points: Iterable[Point], field: str) -> list[str]:
    return list(dict.fromkeys(getattr(point, field) for point in points))
