"""Results made visible: tables on the screen or in Markdown, and one JSON file."""

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm.atomic import write_text
from dlm.bench.config import BenchConfig
from dlm.bench.finding import Finding, Table
from dlm.errors import UserError
from dlm.evaluation.table import markdown

if TYPE_CHECKING:
    from rich.console import Console


class Report:
    """What has been measured so far. The file is written whole after every measurement, so a crash loses one at most."""

    def __init__(self, config: BenchConfig, machine: str) -> None:
        self.file = config.output.file
        if self.file is not None:
            _check_writable(self.file)
        self.writes_tables = config.output.markdown
        self.values: dict[str, Any] = {}
        self.head = {"machine": machine, "config": config.model_dump(mode="json", exclude_none=True)}
        self.tables: list[Table] = []

    def add(self, finding: Finding) -> None:
        """Add one measurement and write the file, and the tables beside it where the config says so."""
        self.values |= finding.values
        self.tables += finding.tables
        if self.file is None:
            return
        texts = {self.file: json.dumps({**self.values, **self.head}, indent=1, ensure_ascii=False)}
        if self.writes_tables:
            texts[self.file.with_suffix(".md")] = "\n\n".join(map(in_markdown, self.tables))
        try:
            for file, text in texts.items():
                write_text(file, text + "\n")
        except OSError as error:
            raise UserError(f"output.file = {self.file}: cannot be written: {error.strerror}") from None


def _check_writable(file: Path) -> None:
    """Tell of a file that cannot be written before anything is measured for it."""
    if not file.parent.is_dir():
        raise UserError(f"output.file = {file}: no such folder: {file.parent} (make it, or give another)")
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise UserError(f"output.file = {file}: cannot be written: {error.strerror}") from None


def show(console: "Console", finding: Finding) -> None:
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


def in_markdown(table: Table) -> str:
    """Title, rows, and what a reader must know of them."""
    rows = [{key: None if row.get(key) is None else cell(row[key]) for key in table.headings} for row in table.rows]
    return "\n\n".join(filter(None, (f"## {table.title}", markdown(rows, table.headings), table.text)))


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
