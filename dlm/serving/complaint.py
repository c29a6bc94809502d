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
    if kind == "missing":
        return Refusal(400, f"{'.'.join(names) or 'the body'} is missing: a request needs it", param=field)
    if not place and kind in ("model_attributes_type", "model_type", "dict_type"):
        return Refusal(400, "the body must be a JSON object, sent with content-type: application/json")
    if kind == "value_error":
        words = str(error["msg"]).removeprefix("Value error, ")
        where = f"{'.'.join(names)}: " if names else ""
        return Refusal(400, where + words, param=field or _quoted(words))
    path, words = _place(names), str(error["msg"]).replace("Input should", "must")
    several = len({tuple(each["loc"]) for each in errors}) > 1 and _same_start(errors, len(names))
    known = next((KINDS[name] for name in reversed(names) if name in KINDS), None)
    if known is not None and (several or len(names) > 1):
        words = f"must be {known}"
        path = _place(names[: max(i for i, name in enumerate(names) if name in KINDS) + 1])
    shown = f" = {_shown(error['input'])}" if len(names) == 1 or known is None else ""
    return Refusal(400, f"{path}{shown}: {words}", param=field)


def _same_start(errors: Sequence[Mapping[str, Any]], _: int) -> bool:
    return len({error["loc"][1] for error in errors if len(error["loc"]) > 1}) == 1


def _place(names: Sequence[str]) -> str:
    return ".".join(names)


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
