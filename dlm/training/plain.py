"""Plain Python data as JSON and back, exactly: also tuples, bytes and keys that are no strings. Never runs code."""

import json
from base64 import b64decode, b64encode
from numbers import Integral
from typing import Any

from dlm.errors import UserError

TUPLE, BYTES, PAIRS = "__tuple__", "__bytes__", "__pairs__"


def dumps(value: Any) -> str:
    """JSON of numbers, strings, None, bytes, lists, tuples and dicts; anything else is a UserError."""
    return json.dumps(_encode(value, "state"))


def loads(text: str) -> Any:
    """What `dumps` was given."""
    return json.loads(text, object_hook=_decode)


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Integral):  # numpy's
        return int(value)
    if isinstance(value, bytes):
        return {BYTES: b64encode(value).decode("ascii")}
    if isinstance(value, (list, tuple)):
        entries = [_encode(entry, f"{where}[{n}]") for n, entry in enumerate(value)]
        return {TUPLE: entries} if isinstance(value, tuple) else entries
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: _encode(entry, f"{where}.{key}") for key, entry in value.items()}
        return {PAIRS: [[_encode(k, where), _encode(v, f"{where}.{k}")] for k, v in value.items()]}
    raise UserError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: make it a string or a number"
    )


def _decode(table: dict[str, Any]) -> Any:
    if len(table) == 1:
        ((key, value),) = table.items()
        if key == TUPLE:
            return tuple(value)
        if key == BYTES:
            return b64decode(value)
        if key == PAIRS:
            return dict(value)
    return table
