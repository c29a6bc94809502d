"""Reads the JSON files of a checkpoint, which may come from anyone, with limits on size and depth."""

import json
from pathlib import Path
from typing import Any

from dlm.errors import UserError

MOST_BYTES = 32 * 2**20
"""The index of a checkpoint with 100,000 tensors takes a quarter of this."""
MOST_NESTED = 64


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when the file does not exist."""
    if not path.is_file():
        return {}
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise UserError(f"{path} cannot be read as json: it has {size:,} bytes, and the limit is {MOST_BYTES:,}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{path} cannot be read as json: lists or objects are nested too deeply in it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read as json: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be read as json: {path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a json object, not {type(value).__name__}")
    _check_depth(value, path)
    return value


def _check_depth(value: dict[str, Any], path: Path) -> None:
    """Refuse nesting that would later, when the value is written or shown, end in a RecursionError."""
    level: list[Any] = [value]
    for _ in range(MOST_NESTED):
        inside = (part.values() if isinstance(part, dict) else part for part in level)
        level = [entry for entries in inside for entry in entries if isinstance(entry, dict | list)]
        if not level:
            return
    raise UserError(f"{path} cannot be read as json: its lists or objects are nested more than {MOST_NESTED} deep")
