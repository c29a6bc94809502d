"""A checkpoint's config.json while it is read, with errors that name the key. Knows nothing of any family."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlm.errors import UserError

_REQUIRED: Any = object()


def read_json(path: Path) -> dict[str, Any]:
    """A json object; empty when the file is not there."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as json: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a json object, not {type(value).__name__}")
    return value


def first_id(value: Any) -> int | None:
    """A special token's id. Several ids of end-of-text may be listed, the main one first; -1 means none."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) and value >= 0 else None


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

    def only(self, key: str, *accepted: Any) -> None:
        """Refuse a setting that changes what the network computes and that this project does not implement."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            known = " or ".join(repr(a) for a in accepted)
            raise UserError(f"{self.source}: {key}={value!r} is not supported; only {known} is")

    def no_sliding_window(self, layers: int) -> None:
        """Sliding-window attention may be declared as long as no layer uses it."""
        for kind in self.values.get("layer_types") or ():
            if kind != "full_attention":
                raise UserError(f"{self.source}: layer_types has {kind!r}; only 'full_attention' is supported")
        window, used = self.values.get("sliding_window"), self.values.get("use_sliding_window", False)
        if used and window is not None and self.values.get("max_window_layers", 0) < layers:
            raise UserError(f"{self.source}: sliding_window={window!r} is in use; sliding windows are not supported")

    def head_dim(self) -> int:
        """Stated, or the model width over the heads."""
        return self.get("head_dim", default=None) or self.get("hidden_size") // self.get("num_attention_heads")

    def rope(self) -> dict[str, Any]:
        """`rope_theta`, `rope_scaling` and `rotary_dim`, from either spelling transformers has had."""
        both = dict(self.get("rope_parameters", default={}))  # transformers 5: everything in one dict
        theta = both.pop("rope_theta", 10_000.0)
        scaling = dict(self.get("rope_scaling", default=both))
        scaling.pop("rope_theta", None)
        partial = scaling.pop("partial_rotary_factor", None) or self.get("partial_rotary_factor", default=None)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        width = self.head_dim()
        rotary = int(width * partial) if partial else self.get("rotary_dim", default=width)
        return {
            "rope_theta": self.get("rope_theta", default=theta),
            "rope_scaling": None if kind == "default" else scaling,
            "rotary_dim": None if rotary == width else rotary,
        }
