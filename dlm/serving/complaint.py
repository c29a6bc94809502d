"""What is wrong with a body, in one sentence that names the field: from pydantic's list to OpenAI's error."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dlm.serving.refusal import Refusal

KINDS = {
    "prompt": "a text, a list of token ids, or a list of either",
    "stop": "a text, or a list of texts",
    "content": "a text, or a list of text parts",
    "gen_length": 'an integer or "auto"',
}
"""What fields of several kinds take."""


def complaint(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """The first mistake."""
    error = errors[0]
    kind, place = error["type"], [part for part in error["loc"] if part != "body"]
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return Refusal(400, f"the body is not valid JSON: {reason} at character {place[0] if place else 0}")
    names = [str(part) for part in place]
    field = names[0] if names else None
    if kind == "missing" and names:
        return Refusal(400, f"{'.'.join(names)} is missing: a request needs it", param=field)
    if not place and kind in ("missing", "model_attributes_type", "model_type", "dict_type"):
        return Refusal(400, "the body must be a JSON object, sent with content-type: application/json")
    if kind == "value_error":
        words = str(error["msg"]).removeprefix("Value error, ")
        where = f"{'.'.join(names)}: " if names else ""
        return Refusal(400, where + words, param=field or _quoted(words))
    several = max((number for number, name in enumerate(names) if name in KINDS), default=None)
    if several is not None and len(names) > several + 1:  # behind the field stands which of its kinds was tried
        return Refusal(400, f"{'.'.join(names[: several + 1])}: must be {KINDS[names[several]]}", param=field)
    words = str(error["msg"]).replace("Input should", "must")
    return Refusal(400, f"{'.'.join(names)} = {_shown(error['input'])}: {words}", param=field)


def _quoted(words: str) -> str | None:
    """The field that a message of ours begins with."""
    first, found, _ = words.removeprefix("unknown field ").removeprefix('"').partition('"')
    if found:
        return first
    word = words.split(" ", 1)[0]
    return word if word.isidentifier() and "_" in word else None


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
