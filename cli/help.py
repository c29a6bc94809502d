"""The --help page of a command: its words, options and config fields with type, default and meaning."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .flags import Word

if TYPE_CHECKING:
    from dlm.fields import Field

    from .options import Command

BOLD, CYAN, YELLOW, PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[33m", "\x1b[0m"


def print_page(command: Command) -> None:
    """Write the page to standard output. Plain text: importing rich would take longer than all the rest."""
    print("\n".join(page(command, shutil.get_terminal_size((100, 24)).columns, sys.stdout.isatty())))


def print_overview(name: str, summary: str, subcommands: Mapping[str, str]) -> None:
    print(f"{summary}\n\nUsage: {name} SUBCOMMAND [OPTION]… (each has a --help of its own)\n")
    for known, does in subcommands.items():
        print(f"  {known}: {does}")


def page(command: Command, width: int, color: bool) -> Iterator[str]:
    yield from textwrap.wrap(command.summary, width)
    keys = "" if command.config is None else " [--section.key VALUE]…"
    yield f"\nUsage: {command.name}{''.join(map(_usage, command.words))} [OPTION]…{keys}\n"
    for word in command.words:
        yield from _entry(word.name, "", word.help, width, color)
    yield _paint("Options", BOLD, color)
    for flag in command.all_flags:
        repeat = " Repeatable." if flag.repeatable else ""
        value = f"[{flag.metavar}]" if flag.alone is not None else flag.metavar
        yield from _entry(f"{flag.name} {value}".rstrip(), "", flag.help + repeat, width, color)
    if command.config is None:
        return
    from dlm.fields import fields, type_name

    for section, entries in _sections(fields(command.config)).items():
        heading = f"[[{section[:-2]}]]" if section.endswith(".N") else f"[{section}]" if section else "Top of the file"
        yield "\n" + _paint(heading, BOLD, color)
        for entry in entries:
            kind = f"{type_name(entry.annotation)}{_default(entry.default)}"
            yield from _entry(_spelling(entry), kind, entry.description, width, color)


def _usage(word: Word) -> str:
    name = f"{word.name}…" if word.repeatable else word.name
    return f" {name}" if word.required else f" [{name}]"


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
