"""The fields of a config class: lists them, names their types in words, and parses text into their values."""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

Key = tuple[str | int, ...]
NOTHING = "none"  # TOML has no null: this word, in a field that may be empty, empties it
TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
    tuple: "a list",
    list: "a list",
    dict: "a table",
    types.NoneType: f'"{NOTHING}"',
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """One leaf of a config class, as the help page and the override parser see it."""

    key: str  # dotted; an entry of a list is N: "sampler.rule", "job.N.prompt"
    annotation: Any
    default: Any  # `...` when the user must give it
    description: str

    @property
    def is_flag(self) -> bool:
        return bool in members(self.annotation)

    @property
    def is_strings(self) -> bool:
        return holds_strings(self.annotation)


def fields(cls: type[BaseModel], prefix: str = "", instance: BaseModel | None = None) -> Iterator[Field]:
    """Every leaf of `cls`, sections and lists of sections walked through, in the order of the class.

    Defaults are those of `instance` where the section above gives one.
    """
    defaults: dict[str, Any] = {}
    for name, info in ordered(cls):
        key = f"{prefix}.{name}" if prefix else name
        if instance is not None:
            default = getattr(instance, name)
        elif info.is_required():
            default = ...
        else:
            default = info.get_default(call_default_factory=True, validated_data=defaults)
        defaults[name] = default
        inner = sections(info.annotation)
        if not inner:
            yield Field(key=key, annotation=info.annotation, default=default, description=info.description or "")
        for section in inner:
            below = default if isinstance(default, section) else None
            yield from fields(section, f"{key}.N" if is_list(info.annotation) else key, below)


def ordered(cls: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """The fields of a config class: those it declares itself, in order, then those it inherits."""
    return sorted(cls.model_fields.items(), key=lambda field: field[0] not in cls.__annotations__)


def type_name(annotation: Any) -> str:
    """What a value must be, in words: `an integer or "auto"`."""
    words: list[str] = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            words += [f'"{value}"' if isinstance(value, str) else str(value) for value in get_args(member)]
        elif isinstance(member, type) and issubclass(member, Enum):
            words += [f'"{value.value}"' for value in member]
        elif isinstance(member, type) and issubclass(member, BaseModel):
            words.append("a table")
        elif get_origin(member) is tuple and ... not in get_args(member):
            words.append(f"a list of {len(get_args(member))}")
        else:
            words.append(TYPE_NAMES.get(get_origin(member) or member, str(member)))
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def choices(annotation: Any) -> list[str]:
    """The words a field accepts by name."""
    found: list[str] = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            found += [value for value in get_args(member) if isinstance(value, str)]
        elif isinstance(member, type) and issubclass(member, Enum):
            found += [str(value.value) for value in member]
    return found


def members(annotation: Any) -> list[Any]:
    """The alternatives of a type: `Annotated` and unions opened."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in members(part)]
    return [annotation]


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The config classes a field holds: itself, its alternatives, or the entries of its list."""
    found: list[type[BaseModel]] = []
    for member in members(annotation):
        if get_origin(member) in (list, tuple):
            found += sections(_items(member))
        elif isinstance(member, type) and issubclass(member, BaseModel):
            found.append(member)
    return found


def is_list(annotation: Any) -> bool:
    return any((get_origin(member) or member) in (list, tuple) for member in members(annotation))


def annotation_at(cls: type[BaseModel], key: Key) -> Any:
    """The type at a key path, or None where the path leaves the class."""
    annotation: Any = cls
    for part in key:
        below: Any = None
        for member in members(annotation):
            if isinstance(member, type) and issubclass(member, BaseModel) and part in member.model_fields:
                below = member.model_fields[str(part)].annotation
            elif get_origin(member) is dict or (get_origin(member) in (list, tuple) and isinstance(part, int)):
                below = _items(member)
        if below is None:
            return None
        annotation = below
    return annotation


def parse(text: str, annotation: Any) -> Any:
    """A command-line word as a TOML value or, where the field takes text, as the string itself."""
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML; a number of 5,000 digits, a thousand brackets
        return text
    takes_text = str in members(annotation) or holds_strings(annotation)
    if annotation is None or isinstance(value, str) or not takes_text:
        return value
    try:
        TypeAdapter(annotation).validate_python(prepare(value, annotation), strict=True)
    except ValidationError:
        return text
    return value


def prepare(value: Any, annotation: Any) -> Any:
    """The value with types that TOML lacks: tuples from lists, paths and enums from strings, None from "none".

    A string where only a list of strings can stand is a list of this one.
    """
    alternatives = members(annotation)
    if value == NOTHING and types.NoneType in alternatives:
        return None
    if isinstance(value, str) and holds_strings(annotation):
        value = [value]
    for member in alternatives:
        kind = get_origin(member) or member
        if not isinstance(kind, type):
            continue
        if isinstance(value, dict) and issubclass(kind, BaseModel):
            value = {name: _prepare_field(kind, name, entry) for name, entry in value.items()}
        elif isinstance(value, dict) and kind is dict:
            value = {name: prepare(entry, _items(member)) for name, entry in value.items()}
        elif isinstance(value, list) and kind in (list, tuple):
            return kind(prepare(entry, _items(member)) for entry in value)
        elif isinstance(value, str) and kind is Path:
            return Path(value)
        elif isinstance(value, str) and issubclass(kind, Enum):
            return next((option for option in kind if option.value == value), value)
    return value


def holds_strings(annotation: Any) -> bool:
    """Whether a value of this type is a list of strings, and nothing else."""
    kinds = [member for member in members(annotation) if member is not types.NoneType]
    return len(kinds) == 1 and get_origin(kinds[0]) in (list, tuple) and _is_text(_items(kinds[0]))


def _is_text(annotation: Any) -> bool:
    return all(
        member is str or (get_origin(member) is Literal and all(isinstance(v, str) for v in get_args(member)))
        for member in members(annotation)
    )


def _prepare_field(cls: type[BaseModel], name: str, value: Any) -> Any:
    """A field's value; a table lies over the section that is the field's default, not over that section's class."""
    info = cls.model_fields.get(name)
    if info is None:
        return value
    default = info.get_default(call_default_factory=False)
    if isinstance(value, dict) and isinstance(default, BaseModel):
        value = {**{key: getattr(default, key) for key in default.model_fields_set}, **value}
    return prepare(value, info.annotation)


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The values of a table of tables under dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


def _items(annotation: Any) -> Any:
    inner = [part for part in get_args(annotation) if part is not ...]
    return inner[-1] if inner else Any
