"""TOML files and dotted overrides → one frozen pydantic config, and back. Knows no subsystem: each room owns its class.

Every mistake becomes a `UserError` that says where the value came from, its key path, and the nearest valid name.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import tomli
import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dlm.errors import COMMAND_LINE, UserError, nearest
from dlm.fields import NOTHING, Key, annotation_at, choices, fields, is_list, parse, prepare, sections, type_name

Config = TypeVar("Config", bound=BaseModel)
SHIPPED = Path(import_module("dlm.configs").__path__[0])
# Every other kind of complaint is about a value of the right type, and pydantic's own words for it are good.
TYPE_COMPLAINTS = (
    *("_type", "_parsing", "literal_error", "int_from_float"),
    *("enum", "none_required", "is_instance_of", "missing"),
)


@dataclass(frozen=True)
class Origins:
    """Where the values under validation were written: the validation context that `load` gives."""

    sources: Mapping[Key, str]
    order: Sequence[str]

    def inherited(self, key: Key, decider: Key) -> bool:
        """Whether the value at `key` is from an earlier file than the one at `decider`, and so was overridden."""
        first, second = (self.sources.get(one) for one in (key, decider))
        known = first in self.order and second in self.order
        return known and self.order.index(str(first)) < self.order.index(str(second))


def load(cls: type[Config], files: Sequence[str | Path] = (), overrides: Mapping[str, str] | None = None) -> Config:
    """A config of `cls` from `files` (paths or shipped names; later ones win) and dotted `overrides`."""
    merged: dict[str, Any] = {}
    sources: dict[Key, str] = {}
    for file in files:
        _merge(merged, read(file), str(file), sources)
    for dotted, text in (overrides or {}).items():
        _override(cls, merged, dotted, text, sources)
    order = (*map(str, files), COMMAND_LINE)
    return _validate(cls, merged, sources, origin=str(files[-1]) if files else COMMAND_LINE, order=order)


def check(cls: type[Config], table: Mapping[str, Any], source: str) -> Config:
    """A config from a table; `source` names the table in messages."""
    merged: dict[str, Any] = {}
    sources: dict[Key, str] = {}
    _merge(merged, table, source, sources)
    return _validate(cls, merged, sources, source)


def read(file: str | Path) -> dict[str, Any]:
    """The table in one TOML file, given by path or by shipped name."""
    path = find(file)
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except tomli.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not a text file (TOML is UTF-8): {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
        raise UserError(f"{file}: cannot be read as TOML: {error}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read as a config file: {error.strerror}") from None


def find(file: str | Path) -> Path:
    """The file at this path or, failing that, the shipped config of this name, with or without `.toml`."""
    if Path(file).is_file() or (Path(file).exists() and Path(file).suffix == ".toml"):
        return Path(file)
    known = shipped()
    stem = str(file).removeprefix("configs/").removesuffix(".toml")
    if stem in known:
        return SHIPPED / f"{stem}.toml"
    raise UserError(f"{file}: no such config file{nearest(stem, known)} (shipped configs: {', '.join(known)})")


def shipped() -> list[str]:
    """Names of the configs that come with the package."""
    folders = ("", "dflash/", "eval/", "latent/")
    return sorted(folder + path.stem for folder in folders for path in (SHIPPED / folder).glob("*.toml"))


def to_toml(config: BaseModel) -> str:
    """TOML that `load` turns into an equal config, every default spelled out."""
    table = _dump(config)
    # A TOML reader may fold carriage returns inside """ strings: then keep every string on one line.
    return tomli_w.dumps(table, multiline_strings="\\r" not in json.dumps(table))


def _dump(config: BaseModel) -> dict[str, Any]:
    """A config as TOML's own types. An empty field is left out where that is its default, and else says "none"."""

    def plain(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return _dump(value)
        if isinstance(value, (list, tuple)):
            return [plain(entry) for entry in value]
        if isinstance(value, dict):
            return {name: plain(entry) for name, entry in value.items()}
        if isinstance(value, Enum):
            return value.value
        return value if isinstance(value, (bool, int, float)) else NOTHING if value is None else str(value)

    table: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if value is not None or info.get_default(call_default_factory=True, validated_data=vars(config)) is not None:
            table[name] = plain(value)
    return table


def _merge(into: dict[str, Any], table: Mapping[str, Any], source: str, sources: dict[Key, str], at: Key = ()) -> None:
    """Deep-merge tables; lists and values are replaced whole. Remembers who set what, for the error messages."""
    for name, value in table.items():
        sources[(*at, name)] = source
        if isinstance(value, dict):
            into[name] = into[name] if isinstance(into.get(name), dict) else {}
            _merge(into[name], value, source, sources, (*at, name))
        else:
            into[name] = value


def _override(cls: type[BaseModel], into: dict[str, Any], dotted: str, text: str, sources: dict[Key, str]) -> None:
    """Set `dotted` (`sampler.rule`, `job.0.prompt`) to the value `text` spells for that field's type."""
    key: Key = ()
    holder: Any = into
    *above, last = (int(part) if part.isdigit() else part for part in dotted.split("."))
    for part in above:
        key = (*key, part)
        sources[key] = COMMAND_LINE
        if isinstance(holder, dict) and not isinstance(holder.get(part), (dict, list)):
            holder[part] = [] if is_list(annotation_at(cls, key)) else {}
        holder = _entry(holder, part, dotted)
    if isinstance(holder, list):
        _entry(holder, last, dotted)
    sources[*key, last] = COMMAND_LINE
    value = parse(text, annotation_at(cls, (*key, last)))
    holder[last] = value  # pyright: ignore[reportArgumentType, reportCallIssue]


def _entry(holder: Any, part: str | int, dotted: str) -> Any:
    if isinstance(holder, list) and not (isinstance(part, int) and part < len(holder)):
        raise UserError(f"{COMMAND_LINE}: --{dotted}: there is no entry {part}: the list has {len(holder)}, from 0 on")
    return holder[part]  # pyright: ignore[reportArgumentType, reportCallIssue]


def _validate(
    cls: type[Config], merged: dict[str, Any], sources: dict[Key, str], origin: str, order: Sequence[str] = ()
) -> Config:
    try:
        return cls.model_validate(prepare(merged, cls), strict=True, context=Origins(sources, order))
    except ValidationError as error:
        raise UserError("\n".join(_explain(error.errors(), cls, merged, sources, origin))) from None


def _explain(
    errors: Sequence[ErrorDetails], cls: type[BaseModel], data: Mapping[str, Any], sources: dict[Key, str], origin: str
) -> list[str]:
    """The messages, one a mistake: pydantic's several complaints about one value become one."""
    gathered: dict[Key, list[ErrorDetails]] = {}
    for error in errors:
        if error["type"] == "default_factory_not_called":  # it needs a value that another error is about
            continue
        gathered.setdefault(_locate(error, data), []).append(error)
    # A value that a section inherits is complained of there too: the place where it was written is enough.
    written = {key: found for key, found in gathered.items() if key in sources}
    return [_sentence(key, found, cls, sources, origin) for key, found in (written or gathered).items()]


def _locate(error: ErrorDetails, data: Any) -> Key:
    """The key path in the user's data; pydantic's path also names the union branches it tried."""
    key: Key = ()
    for part in error["loc"]:
        inside = part in data if isinstance(data, Mapping) else isinstance(part, int) and part < len(data)
        if inside and isinstance(data, (Mapping, list)):
            data, key = data[part], (*key, part)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if not isinstance(data, (Mapping, list)):
            break
    return (*key, error["loc"][-1]) if _is_missing(error) else key


def _is_missing(error: ErrorDetails) -> bool:
    """Whether a key is absent; pydantic says the same of the last entry of a short list."""
    return error["type"] == "missing" and isinstance(error["loc"][-1], str)


def _sentence(
    key: Key, found: Sequence[ErrorDetails], cls: type[BaseModel], sources: dict[Key, str], origin: str
) -> str:
    first, value, path = found[0], found[0]["input"], ".".join(map(str, key))
    below = [source for place, source in sources.items() if place[: len(key)] == key]
    where = sources.get(key, origin) if not isinstance(value, Mapping) else " and ".join(dict.fromkeys(below)) or origin
    if _is_missing(first):
        needed = type_name(annotation_at(cls, key))
        return f'{origin}: "{path}" is missing: give {needed}, in the file or as --{path}'
    if first["type"] == "extra_forbidden":
        return f'{where}: unknown key "{path}"{_known(cls, key)}'
    values = [error for error in found if not error["type"].endswith(TYPE_COMPLAINTS)]
    if values and isinstance(value, (Mapping, BaseModel)):  # a combination that a section's own check refused
        return f"{where}: {f'[{path}] ' if key else ''}{_words(values[0])}"
    annotation = annotation_at(cls, key)
    expected = _words(values[0]) if values else f"expected {type_name(annotation)}"
    near = nearest(value, choices(annotation)) if isinstance(value, str) else ""
    return f"{where}: {path} = {_show(value)}: {expected}{near}"


def _known(cls: type[BaseModel], key: Key) -> str:
    """The nearest key of this section, else the same name in another section, else the section's keys."""
    section = ".".join(map(str, key[:-1]))
    models = sections(annotation_at(cls, key[:-1]))
    for model in models:
        if (ours := getattr(model, "ALIASES", {}).get(key[-1])) is not None:
            return f"; here it is {ours}"
    here = [name for model in models for name in model.model_fields]
    dotted = {name: f"{section}.{name}" if section else name for name in here}
    near = difflib.get_close_matches(str(key[-1]), here, n=1, cutoff=0.6)
    everywhere = [field.key for field in fields(cls)]
    twins = [name for name in everywhere if name.rpartition(".")[2] == key[-1]]
    if near or twins:
        return f'; did you mean "{dotted[near[0]] if near else twins[0]}"?'
    return f"; known keys{f' in [{section}]' if section else ''}: {', '.join(here)}"


def _words(error: ErrorDetails) -> str:
    raised = error.get("ctx", {}).get("error")
    return str(raised) if raised is not None else error["msg"].replace("Input should", "must", 1)


def _show(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    text = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
