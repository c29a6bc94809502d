"""Findings made visible: tables on the screen, one JSON file, one plot. Knows no measurement."""

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm.bench.config import BenchConfig
from dlm.bench.finding import Finding, Point, Table
from dlm.data.atomic import replacing, write_text
from dlm.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


MARKERS, LINES = "osv^DxP*", ("-", "--", ":", "-.")


class Report:
    """What has been measured so far. The file is written whole after every measurement, so a crash loses one at most."""

    def __init__(self, config: BenchConfig, machine: str) -> None:
        self.file = config.output.file
        if self.file is not None and not self.file.parent.is_dir():
            raise UserError(f"output.file = {self.file}: no such folder: {self.file.parent} (make it, or give another)")
        self.draws = config.output.plot
        self.values: dict[str, Any] = {}
        self.head = {"machine": machine, "config": config.model_dump(mode="json", exclude_none=True)}
        self.points: list[Point] = []

    def add(self, finding: Finding) -> None:
        """Take in one measurement, and write the file."""
        self.values |= finding.values
        self.points += finding.points
        if self.file is not None:
            text = json.dumps({**self.values, **self.head}, indent=1, ensure_ascii=False)
            try:
                write_text(self.file, text + "\n")
            except OSError as error:
                raise UserError(f"output.file = {self.file}: cannot be written: {error.strerror}") from None

    def plot(self) -> Path | None:
        """Draw the points beside the file; None where there is nothing to draw. Raises UserError without matplotlib."""
        if not self.points or not self.draws or self.file is None:
            return None
        target = self.file.with_suffix(".png")
        draw(self.points, target)
        return target


def show(console: "Console", finding: Finding) -> None:
    """Tables, then notes."""
    from rich.text import Text

    for table in finding.tables:
        console.print(rendered(table))
        if table.text:
            console.print(Text(table.text, "dim"))
        console.print()
    for note in finding.notes:
        console.print(Text(note, "dim"))


def rendered(table: Table) -> Any:
    """A rich table: texts to the left, numbers to the right."""
    from rich import box
    from rich.table import Table as Rich
    from rich.text import Text

    view = Rich(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for number, (key, heading) in enumerate(table.headings.items()):
        words = number == 0 or any(isinstance(row.get(key), str) and not _is_figure(row[key]) for row in table.rows)
        view.add_column(Text(heading), justify="left" if words else "right", overflow="fold")
    for row in table.rows:
        view.add_row(*(Text(cell(row.get(key))) for key in table.headings))
    return view


def cell(value: Any) -> str:
    """A value as a table writes it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_figure(text: str) -> bool:
    return re.fullmatch(r"–|-?[\d.,]+(?:\s?[%×].*)?", text) is not None


def draw(points: Sequence[Point], file: Path) -> None:
    """Quality against tokens a forward pass: a panel a task, a line a series, all in one picture."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "the plot needs matplotlib: pip install 'dlm[plot]' (tables and JSON are complete; "
            "--output.no-plot does without)"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(point.panel for point in points))
    series, kinds = (list(dict.fromkeys(getattr(point, name) for point in points)) for name in ("series", "kind"))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False)
    colours = pyplot.get_cmap("tab10")
    for axis, panel in zip(axes[0], panels, strict=True):
        for (i, name), (j, kind) in product(enumerate(series), enumerate(kinds)):
            own = [p for p in points if (p.panel, p.series, p.kind) == (panel, name, kind)]
            if not own:
                continue
            own.sort(key=lambda p: p.tpf)
            errors = None
            if all(p.low is not None and p.high is not None for p in own):
                errors = [[p.quality - (p.low or 0.0) for p in own], [(p.high or 0.0) - p.quality for p in own]]
            axis.errorbar(
                [p.tpf for p in own],
                [p.quality for p in own],
                errors,
                marker=MARKERS[j % len(MARKERS)],
                linestyle=LINES[j % len(LINES)],
                color=colours(i % 10),
                markersize=4,
                elinewidth=0.5,
                linewidth=1,
                label=f"{name}, {kind}",
            )
        axis.set(xlabel="tokens a forward pass", title=panel)
        axis.grid(alpha=0.3)
    handles = {
        label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=130, bbox_inches="tight", format=file.suffix[1:])
    pyplot.close(figure)
