"""The --help page: every flag and every config field with its type, default and meaning. Knows no particular command."""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from dlm.fields import Field, fields, type_name

from .flags import COMMON_FLAGS, Flag

BOLD, CYAN, YELLOW, PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[33m", "\x1b[0m"


def print_help(name: str, summary: str, flags: Iterable[Flag], config: type[BaseModel]) -> None:
    """Write the page to standard output. Plain text rather than rich: importing rich takes longer than all the rest."""
    print(
        "\n".join(page(name, summary, flags, config, shutil.get_terminal_size((100, 24)).columns, sys.stdout.isatty()))
    )


def page(
    name: str, summary: str, flags: Iterable[Flag], config: type[BaseModel], width: int, color: bool
) -> Iterator[str]:
    """The lines of the page."""
    yield from textwrap.wrap(summary, width)
    yield f"\nUsage: {name} [OPTION]… [--section.key VALUE]…\n"
    yield _paint("Options", BOLD, color)
    for flag in (*flags, *COMMON_FLAGS):
        repeat = " Repeatable." if flag.repeatable else ""
        yield from _entry(f"{flag.name} {flag.metavar}".rstrip(), "", flag.help + repeat, width, color)
    for section, entries in _sections(fields(config)).items():
        heading = f"[[{section[:-2]}]]" if section.endswith(".N") else f"[{section}]" if section else "Top of the file"
        yield "\n" + _paint(heading, BOLD, color)
        for entry in entries:
            kind = f"{type_name(entry.annotation)}{_default(entry.default)}"
            yield from _entry(_spelling(entry), kind, entry.description, width, color)


def _sections(entries: Iterable[Field]) -> dict[str, list[Field]]:
    """Fields by their section; those without one first, as in a file."""
    found: dict[str, list[Field]] = {"": []}
    for entry in entries:
        found.setdefault(entry.key.rpartition(".")[0], []).append(entry)
    return {section: inside for section, inside in found.items() if inside}


def _spelling(entry: Field) -> str:
    section, dot, leaf = entry.key.rpartition(".")
    return f"--{entry.key} / --{section}{dot}no-{leaf}" if entry.is_flag else f"--{entry.key}"


def _entry(name: str, kind: str, meaning: str, width: int, color: bool) -> Iterator[str]:
    yield f"  {_paint(name, CYAN, color)}" + (f"  {_paint(kind, YELLOW, color)}" if kind else "")
    yield from textwrap.wrap(meaning, max(width, 40), initial_indent=" " * 6, subsequent_indent=" " * 6)


def _default(value: Any) -> str:
    if value is ...:
        return " (required)"
    return "" if value is None else f" = {json.dumps(value, default=str, ensure_ascii=False)}"


def _paint(text: str, style: str, color: bool) -> str:
    return f"{style}{text}{PLAIN}" if color else text
