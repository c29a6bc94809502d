"""Reads a checkpoint's config.json, with errors that name the key."""

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlm.data.gguf import is_gguf
from dlm.data.json_file import read_object
from dlm.errors import UserError

MOST = 2**31
"""Every size in a configuration must be smaller."""
_REQUIRED: Any = object()


def read_json(path: Path) -> dict[str, Any]:
    """A json object; empty when the file is not there."""
    return read_object(path)


def settings_of(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint's folder, or what a GGUF file says in its place; empty when neither is there."""
    if is_gguf(path):
        from dlm.models import gguf

        return gguf.settings_of(path)
    return read_json(path / "config.json")


def generation_of(path: Path) -> dict[str, Any]:
    """generation_config.json of a checkpoint's folder, or what a GGUF file says in its place; empty when not there."""
    if is_gguf(path):
        from dlm.models import gguf

        return gguf.generation_of(path)
    return read_json(path / "generation_config.json")


def source_of(path: Path) -> Path:
    """The file that a checkpoint's settings stand in, for messages."""
    return path if is_gguf(path) else path / "config.json"


def first_id(value: Any, source: str = "config.json", key: str = "a special token's id") -> int | None:
    """A special token's id. Several ids of end-of-text may be listed, the main one first; -1 means none."""
    listed = value if isinstance(value, list) else [value]
    for token in listed:
        if token is not None and (type(token) is not int or abs(token) >= 2**31):
            raise UserError(f"{source}: {key} = {reprlib.repr(value)} should be a token id, a list of them, or null")
    return next((token for token in listed[:1] if token is not None and token >= 0), None)


class Settings:
    """Reads keys of a hub configuration; `source` is the file that error messages name."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def get(self, *keys: str, default: Any = _REQUIRED) -> Any:
        """The first of `keys` that is there and not null."""
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        if default is _REQUIRED:
            raise UserError(f"{self.source} has no {' or '.join(map(repr, keys))}, which this family needs")
        return default

    def size(self, *keys: str, default: Any = _REQUIRED) -> int:
        """A whole number from 1 up, as every count and width is."""
        value = self.get(*keys, default=default)
        if value is not default and (type(value) is not int or not 0 < value < MOST):
            raise self.wrong(value, "a whole number from 1 up, below 2**31", *keys)
        return value

    def number(self, *keys: str, default: Any = _REQUIRED) -> float:
        """A finite number above 0."""
        value = self.get(*keys, default=default)
        if value is not default and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise self.wrong(value, "a number above 0", *keys)
        return value

    def table(self, *keys: str) -> dict[str, Any]:
        """A copy of an object; empty where the key is not there."""
        value = self.get(*keys, default={})
        if not isinstance(value, dict):
            raise self.wrong(value, "an object", *keys)
        return dict(value)

    def wrong(self, value: Any, expected: str, *keys: str) -> UserError:
        """The error for a key whose value is of another kind."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        return UserError(f"{self.source}: {key} = {reprlib.repr(value)} should be {expected}")

    def only(self, key: str, *accepted: Any) -> None:
        """Refuse a setting that changes what the network computes and that this project does not implement."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            known = " or ".join(repr(a) for a in accepted)
            only = f"; only {known} is" if accepted else ""
            raise UserError(f"{self.source}: {key}={reprlib.repr(value)} is not supported{only}")

    def no_sliding_window(self, layers: int) -> None:
        """Sliding-window attention may be declared as long as no layer uses it."""
        kinds = self.get("layer_types", default=[])
        if not isinstance(kinds, list):
            raise self.wrong(kinds, "a list", "layer_types")
        for kind in kinds:
            if kind != "full_attention":
                raise UserError(
                    f"{self.source}: layer_types has {reprlib.repr(kind)}; only 'full_attention' is supported"
                )
        window, used = self.values.get("sliding_window"), self.values.get("use_sliding_window", False)
        if used and window is not None:
            first = self.get("max_window_layers", default=0)
            if type(first) is not int or first < layers:
                raise UserError(
                    f"{self.source}: sliding_window={reprlib.repr(window)} is in use; sliding windows are not supported"
                )

    def head_dim(self) -> int:
        """Stated, or the model width over the heads."""
        stated = self.size("head_dim", default=None)
        return stated or self.width_of_head("hidden_size", "num_attention_heads")

    def width_of_head(self, width: str, heads: str) -> int:
        """The model width over the heads, which must divide it."""
        if self.size(width) % self.size(heads):
            raise UserError(
                f"{self.source}: {width} = {self.size(width)} is not a multiple of {heads} = {self.size(heads)}"
            )
        return self.size(width) // self.size(heads)

    def rope(self) -> dict[str, Any]:
        """`rope_theta`, `rope_scaling` and `rotary_dim`, from either spelling transformers has had."""
        both = self.table("rope_parameters")  # transformers 5: everything in one dict
        theta = both.pop("rope_theta", 10_000.0)
        scaling = self.table("rope_scaling") if self.values.get("rope_scaling") is not None else both
        scaling.pop("rope_theta", None)
        partial = scaling.pop("partial_rotary_factor", None)
        if partial is None:
            partial = self.get("partial_rotary_factor", default=None)
        if partial is not None and (type(partial) not in (int, float) or not 0 < partial <= 1):
            raise self.wrong(partial, "a number above 0 and at most 1", "partial_rotary_factor")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        width = self.head_dim()
        rotary = self.size("rotary_dim", default=width) if partial is None else int(width * partial)
        return {
            "rope_theta": self.get("rope_theta", default=theta),
            "rope_scaling": None if kind == "default" else scaling,
            "rotary_dim": None if rotary == width else rotary,
        }
