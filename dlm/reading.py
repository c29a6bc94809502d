"""Settings that are read only under others. One that nothing reads is a mistake: `unread` names what would read it."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import BaseModel, ValidationInfo


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Under which value of another setting a setting is read."""

    decides: str
    """The other setting's key; dotted if it is in an inner section."""
    where: str
    """The condition in words, after "is only read"."""
    reads: Callable[[Any], bool]
    """Whether this config meets it."""


Readers = Mapping[str, Reader]


def unread(config: BaseModel, readers: Readers, names: Iterable[str]) -> str | None:
    """What is wrong with the first of these settings that `config` does not read; None where it reads them all."""
    for name in names:
        reader, value = readers.get(name), getattr(config, name)
        if reader is not None and value is not None and not reader.reads(config):
            decider = attrgetter(reader.decides)(config)
            now = f"{reader.decides} is not set" if decider is None else f"{reader.decides} = {_shown(decider)}"
            return f"{name} = {_shown(value)} is only read {reader.where}, and {now}: change that, or leave {name} out"
    return None


def judged(section: BaseModel, readers: Readers, info: ValidationInfo | None = None, name: str = "") -> list[str]:
    """The settings that a section of a file gives and must read.

    One that only spells out its default beside the setting that decides, as --print-config does, is not among them, nor one
    that a later file or the command line overrode by another choice (`info` is that of the config which holds it as `name`).
    """
    origins = None if info is None else info.context
    given, fields = section.model_fields_set, type(section).model_fields

    def printed(key: str) -> bool:
        decides = readers[key].decides
        # A value of None is left out by --print-config.
        said = decides.partition(".")[0] in given or attrgetter(decides)(section) is None
        return said and getattr(section, key) == fields[key].get_default()

    def inherited(key: str) -> bool:
        return origins is not None and origins.inherited((name, key), (name, *readers[key].decides.split(".")))

    return [key for key in fields if key in given and key in readers and not printed(key) and not inherited(key)]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False, default=repr)
