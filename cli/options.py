"""The one parser of all commands: config files, dotted overrides, plain options, words and subcommands.

Pydantic is imported only for commands with a config: dlm-replay starts in a twentieth of a second.
"""

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_origin

from dlm.errors import COMMAND_LINE, UserError, nearest

from . import streams
from .flags import COMMON_FLAGS, CONFIG_FLAGS, Flag, Word
from .streams import unicode
from .threads import settle_threads

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dlm.fields import Field


@dataclass(frozen=True, kw_only=True)
class Options:
    """A parsed command line. `given` maps an option to its values (`""` where it takes none)."""

    files: list[str] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)
    given: dict[str, list[Any]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def value(self, flag: str, default: Any = None) -> Any:
        """The value of an option, the last one given."""
        return self.given[flag][-1] if flag in self.given else default


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command or subcommand: its config, options and words. The function that does its work is given to `run`."""

    name: str
    summary: str
    config: "type[BaseModel] | None" = None
    flags: tuple[Flag, ...] = ()
    words: tuple[Word, ...] = ()
    unchecked: str = ""  # overrides with this prefix are not checked here: the command does it

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """Its own options, then those that every command has."""
        return (*self.flags, *(CONFIG_FLAGS if self.config is not None else ()), *COMMON_FLAGS)

    def run(self, work: Callable[..., int | None], argv: Sequence[str] | None = None) -> int:
        """The exit status, after --help and its like or the work is done. `work` gets the config and the options, or
        only the options where there is no config.
        """
        return streams.run(self.name.split()[0], lambda: self._run(work, sys.argv[1:] if argv is None else argv))

    def _run(self, work: Callable[..., int | None], argv: Sequence[str]) -> int | None:
        options = self.parse(argv)
        if "--help" in options.given:
            from .help import print_page

            return print_page(self)
        if "--version" in options.given:
            return _print_version()
        if self.config is None:
            self._check_complete(options)
            settle_threads()
            return work(options)
        from dlm.config import load, to_toml

        config = load(self.config, options.files, options.overrides)
        if "--print-config" in options.given:
            return print(to_toml(config).rstrip())
        settle_threads()
        return work(config, options)

    def parse(self, argv: Sequence[str]) -> Options:
        """The parsed command line. An unknown option is an error that names the nearest known one."""
        options, words = Options(), deque(argv)
        flags = {flag.name: flag for flag in self.all_flags}
        while words:
            word = words.popleft()
            name, equals, text = word.partition("=")
            name = "--help" if name == "-h" else name
            if name[:2] in flags and len(name) > 2:  # -n5
                name, equals, text = word[:2], "=", word[2:]
            if word == "--" and self.words:
                for rest in words:
                    self._add_word(rest, options)
                break
            if name in flags:
                self._take(flags[name], text if equals else None, words, options)
            elif not name.startswith("--"):
                self._add_word(word, options)
            elif self.unchecked and name.startswith(self.unchecked):
                options.overrides[name.removeprefix("--")] = text if equals else _next(name, words)
            else:
                key, field = self._field(name, flags)
                off = f"--{key}" != name
                if field.is_flag and (off or (not equals and (not words or words[0] not in ("true", "false")))):
                    text, equals = str(not off).lower(), "="
                text = text if equals else _next(name, words)
                if not equals and field.is_strings and words and not words[0].startswith("--"):
                    text = json.dumps([text, *_until_option(words)])  # the shell expands --data.paths *.txt
                options.overrides[key] = unicode(text, f"{COMMAND_LINE}: --{key}")
        return options

    def _add_word(self, word: str, options: Options) -> None:
        if len(options.words) >= len(self.words) and not (self.words and self.words[-1].repeatable):
            raise UserError(f'unexpected word "{word}": every option starts with -- (see {self.name} --help)')
        options.words.append(word)

    def _take(self, flag: Flag, text: str | None, words: deque[str], options: Options) -> None:
        if flag.metavar:
            if text is None and flag.alone is not None and (not words or words[0].startswith("--")):
                text = flag.alone
            text = _next(flag.name, words) if text is None else text
            if flag.name == "--config":
                options.files.append(text)
        elif text is not None:
            raise UserError(f"{COMMAND_LINE}: {flag.name} takes no value, {text!r} was given")
        if flag.sets:
            options.overrides[flag.sets] = "true" if text is None else text
        if flag.name in options.given and flag.metavar and not flag.repeatable:
            raise UserError(f"{COMMAND_LINE}: {flag.name} is given twice")
        try:
            value = flag.kind(text or "") if flag.metavar else ""
        except ValueError as error:
            said = f"invalid {flag.kind.__name__} value: {text[:60]!r}" if text and flag.kind in (int, float) else error
            raise UserError(f"{COMMAND_LINE}: argument {flag.name}: {said} (see {self.name} --help)") from None
        options.given.setdefault(flag.name, []).append(value)

    def _check_complete(self, options: Options) -> None:
        """Refuse a command line that lacks a word or an option."""
        missing = [word.name for word in self.words[len(options.words) :] if word.required]
        missing += [flag.name for flag in self.flags if flag.required and flag.name not in options.given]
        if missing:
            names = ", ".join(missing)
            raise UserError(f"{COMMAND_LINE}: the following arguments are required: {names} (see {self.name} --help)")

    def _field(self, name: str, flags: Mapping[str, Flag]) -> "tuple[str, Field]":
        """The key and field an override `--section.key` or `--section.no-key` means."""
        known = {}
        key = name.removeprefix("--")
        section, dot, leaf = key.rpartition(".")
        if self.config is not None:
            from dlm.fields import Field, fields, members

            known = {field.key: field for field in fields(self.config)}
            for spelled in (key, f"{section}{dot}{leaf.removeprefix('no-')}"):
                pattern = ".".join("N" if part.isdigit() else part for part in spelled.split("."))
                if pattern in known and (spelled == key or known[pattern].is_flag):
                    return spelled, known[pattern]
            for parent, entry in known.items():
                if key.startswith(f"{parent}.") and dict in [get_origin(part) for part in members(entry.annotation)]:
                    return key, Field(key=key, annotation=Any, default=None, description="")  # a free table's own key
        inside = [f"--{entry}" for entry in known if entry.startswith(f"{key}.")]
        if inside:
            shown = ", ".join(inside[:4]) + (", …" if len(inside) > 4 else "")
            raise UserError(f"{COMMAND_LINE}: {name} is a section: its options are {shown} (see {self.name} --help)")
        twins = [f"--{entry}" for entry in known if entry.rpartition(".")[2] == leaf]
        everywhere = [*flags, *(f"--{entry}" for entry in known)]
        near = f'; did you mean "{twins[0]}"?' if twins else nearest(name, everywhere)
        raise UserError(f"{COMMAND_LINE}: unknown option {name}{near} (see {self.name} --help)")


Subcommands = Mapping[str, tuple[Command, Callable[..., int | None]]]
"""A command's subcommands by their words: what each reads, and the function that does its work."""


def run_subcommand(
    name: str,
    summary: str,
    table: Subcommands,
    argv: Sequence[str] | None = None,
    otherwise: tuple[Command, Callable[..., int | None]] | None = None,
) -> int:
    """The exit status of the subcommand that the first word names; else of `otherwise`, or of listing them."""
    word, *rest = list(sys.argv[1:] if argv is None else argv) or ["" if otherwise else "--help"]
    if word in table:
        command, work = table[word]
        return command.run(work, rest)
    if otherwise is not None and (not word or word.startswith("-")):
        command, work = otherwise
        return command.run(work, [word, *rest] if word else [])
    return streams.run(name, lambda: _without_subcommand(name, summary, table, word))


def _without_subcommand(name: str, summary: str, table: Subcommands, word: str) -> None:
    if word == "--version":
        return _print_version()
    if word in ("--help", "-h"):
        from .help import print_overview

        return print_overview(name, summary, {known: command.summary for known, (command, _) in table.items()})
    if word.startswith("-"):
        raise UserError(f"{COMMAND_LINE}: {word} before a subcommand: they are {', '.join(table)} (see {name} --help)")
    raise UserError(f'no such subcommand: "{word}"{nearest(word, table)} (they are {", ".join(table)})')


def _print_version() -> None:
    from dlm import __version__

    print(__version__)


def _until_option(words: deque[str]) -> Iterator[str]:
    while words and not words[0].startswith("--"):
        yield words.popleft()


def _next(name: str, words: deque[str]) -> str:
    if not words or words[0].startswith("--"):
        raise UserError(f"{COMMAND_LINE}: {name} needs a value (one that starts with -- is written {name}=…)")
    return words.popleft()
