"""A command line: config files, dotted overrides and a few plain flags. Knows no config's meaning and no algorithm."""

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin

from pydantic import BaseModel

from dlm.config import COMMAND_LINE, load, nearest, to_toml
from dlm.errors import UserError
from dlm.fields import Field, fields, holds_strings, members

from . import streams
from .flags import COMMON_FLAGS, Flag
from .streams import unicode
from .threads import settle_threads


@dataclass(frozen=True, kw_only=True)
class Options:
    """A parsed command line. `given` maps a flag to its values (none for a flag without a value)."""

    files: list[str] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)
    given: dict[str, list[str]] = field(default_factory=dict)

    def value(self, flag: str) -> str | None:
        return self.given[flag][-1] if flag in self.given else None


@dataclass(frozen=True, kw_only=True)
class Command:
    """One console command: what it reads, and the function that does its work."""

    name: str
    summary: str
    config: type[BaseModel]
    flags: tuple[Flag, ...] = ()

    def run(self, work: Callable[..., None], argv: Sequence[str] | None = None) -> int:
        """Parse, answer --help and its like, else call `work(config, options)`. Returns the exit status."""
        return streams.run(self.name, lambda: self._run(work, sys.argv[1:] if argv is None else argv))

    def _run(self, work: Callable[..., None], argv: Sequence[str]) -> None:
        options = self.parse(argv)
        if "--help" in options.given:
            from .help import print_help

            return print_help(self.name, self.summary, self.flags, self.config)
        if "--version" in options.given:
            from dlm import __version__

            return print(__version__)
        config = load(self.config, options.files, options.overrides)
        if "--print-config" in options.given:
            return print(to_toml(config).rstrip())
        settle_threads()
        work(config, options)

    def parse(self, argv: Sequence[str]) -> Options:
        """Sort the words of a command line. An unknown option is an error that names the nearest known one."""
        options, words = Options(), deque(argv)
        flags = {flag.name: flag for flag in (*self.flags, *COMMON_FLAGS)}
        while words:
            name, equals, text = words.popleft().partition("=")
            name = "--help" if name == "-h" else name
            if not name.startswith("--"):
                raise UserError(f'unexpected word "{name}": every option starts with -- (see {self.name} --help)')
            if name in flags:
                _take(flags[name], text if equals else None, words, options)
            else:
                key, field = self._field(name, flags)
                off = f"--{key}" != name
                if field.is_flag and (off or (not equals and (not words or words[0] not in ("true", "false")))):
                    text, equals = str(not off).lower(), "="
                text = text if equals else _next(name, words)
                if not equals and holds_strings(field.annotation) and words and not words[0].startswith("--"):
                    text = json.dumps([text, *_until_option(words)])  # what a shell makes of --data.paths *.txt
                options.overrides[key] = unicode(text, f"{COMMAND_LINE}: --{key}")
        return options

    def _field(self, name: str, flags: Mapping[str, Flag]) -> tuple[str, Field]:
        """The key and field an override `--section.key` or `--section.no-key` means."""
        known = {field.key: field for field in fields(self.config)}
        key = name.removeprefix("--")
        section, dot, leaf = key.rpartition(".")
        for spelled in (key, f"{section}{dot}{leaf.removeprefix('no-')}"):
            pattern = ".".join("N" if part.isdigit() else part for part in spelled.split("."))
            if pattern in known and (spelled == key or known[pattern].is_flag):
                return spelled, known[pattern]
        for parent, entry in known.items():
            if key.startswith(f"{parent}.") and dict in [get_origin(member) for member in members(entry.annotation)]:
                return key, Field(key=key, annotation=Any, default=None, description="")  # a free-form table's own key
        inside = [f"--{entry}" for entry in known if entry.startswith(f"{key}.")]
        if inside:
            shown = ", ".join(inside[:4]) + (", …" if len(inside) > 4 else "")
            raise UserError(f"{COMMAND_LINE}: {name} is a section: its options are {shown} (see {self.name} --help)")
        twins = [f"--{entry}" for entry in known if entry.rpartition(".")[2] == leaf]
        near = (
            nearest(name, [*flags, *(f"--{entry}" for entry in known)])
            if not twins
            else f'; did you mean "{twins[0]}"?'
        )
        raise UserError(f"{COMMAND_LINE}: unknown option {name}{near} (see {self.name} --help)")


def _take(flag: Flag, text: str | None, words: deque[str], options: Options) -> None:
    """Note one plain flag, with its value if it takes one."""
    if flag.metavar:
        text = _next(flag.name, words) if text is None else text
        if flag.name == "--config":
            options.files.append(text)
    elif text is not None:
        raise UserError(f"{COMMAND_LINE}: {flag.name} takes no value, {text!r} was given")
    if flag.sets:
        options.overrides[flag.sets] = "true" if text is None else text
    if flag.name in options.given and flag.metavar and not flag.repeatable:
        raise UserError(f"{COMMAND_LINE}: {flag.name} is given twice")
    options.given.setdefault(flag.name, []).append(text or "")


def _until_option(words: deque[str]) -> Iterator[str]:
    """The words before the next option."""
    while words and not words[0].startswith("--"):
        yield words.popleft()


def _next(name: str, words: deque[str]) -> str:
    """The value that follows an option."""
    if not words or words[0].startswith("--"):
        raise UserError(f"{COMMAND_LINE}: {name} needs a value (one that starts with -- is written {name}=…)")
    return words.popleft()
