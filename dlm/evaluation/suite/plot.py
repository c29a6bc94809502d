"""Results drawn: quality against tokens a forward of a sweep, or a bar a task. Needs the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlm.errors import UserError
from dlm.evaluation.suite.sweep import Point, best, by_way, groups

MARKERS = "os^DvP*X"


def draw(values: dict[str, Any], file: Path) -> Path | None:
    """A row of axes for each model and task with several decodings, else bars; None where there is nothing to draw."""
    found = groups(values)
    if not found:
        return None
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'dlm[plot]' (tables and JSON are complete)") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from dlm.atomic import replacing

    sweeps = [group for group in found if len(group) > 1]
    columns = max((len(by_way(group)) for group in sweeps), default=1)
    size = (2.4 + 3.6 * columns + 1.4 * (columns == 1), 4.2 * max(1, len(sweeps)))
    how = {"squeeze": False, "layout": "constrained", "sharex": "row", "sharey": "row"}
    figure, axes = pyplot.subplots(max(1, len(sweeps)), columns, figsize=size, **how)
    if sweeps:
        rules = list(dict.fromkeys(point.rule for group in sweeps for point in group))
        colours = {rule: pyplot.get_cmap("tab10")(i % 10) for i, rule in enumerate(rules)}
        for row, group in zip(axes, sweeps, strict=True):
            _sweep(row, group, colours)
        figure.legend(handles=_legend(colours), loc="outside right upper", fontsize=8, frameon=False)
    else:
        _bars(axes[0][0], [group[0] for group in found])
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=130, format=file.suffix[1:])
    pyplot.close(figure)
    return file


def _sweep(axes: Sequence[Any], group: Sequence[Point], colours: dict[str, Any]) -> None:
    """A column a way of decoding: its rules in their colours, and the front of all ways in grey."""
    whole, found = best(group), by_way(group)
    for axis, (way, points) in zip(axes, found.items(), strict=False):
        axis.plot([p.tpf for p in whole], [p.quality for p in whole], color="0.8", linewidth=4, zorder=0)
        for number, (rule, colour) in enumerate(colours.items()):
            own = sorted((p for p in points if p.rule == rule), key=lambda p: p.tpf)
            if own:
                bars = [[p.quality - p.low for p in own], [p.high - p.quality for p in own]]
                look = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, "linewidth": 1, "elinewidth": 0.6}
                axis.errorbar([p.tpf for p in own], [p.quality for p in own], bars, color=colour, **look)
        axis.set(xlabel="tokens a forward pass", title=way)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.25)
    for axis in axes[len(found) :]:
        axis.remove()
    run = group[0].run
    measure = "bits a byte" if not group[0].rises else run["measure"]
    axes[0].set_ylabel(f"{run['model']} · {run['task']}: {measure}")
    if not group[0].rises:
        axes[0].invert_yaxis()  # up is better, everywhere


def _legend(colours: dict[str, Any]) -> list[Any]:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=colour, marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=1, label=rule)
        for i, (rule, colour) in enumerate(colours.items())
    ]
    return [*lines, Line2D([], [], color="0.8", linewidth=4, label="front of all")]


def _bars(axis: Any, points: Sequence[Point]) -> None:
    for place, p in enumerate(points):
        axis.barh(place, p.quality, xerr=[[p.quality - p.low], [p.high - p.quality]], alpha=0.8, capsize=3)
    axis.set_yticks(range(len(points)), [f"{p.run['model']} · {p.run['task']}" for p in points])
    axis.invert_yaxis()
    axis.set_xlabel("result, with its interval at 95 %")
