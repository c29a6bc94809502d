"""The prompts of JSON-lines files, as conversations that end with a user's message."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dlm.data.local import PATTERNS, find_files
from dlm.errors import UserError
from dlm.prepare.config import ResponsesSection

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Conversation:
    """A conversation that ends with a user's message, and the file and line it is from."""

    messages: Messages
    where: str


def read_prompts(section: ResponsesSection) -> Iterator[Conversation]:
    """Every conversation once, in the order of the files.

    A line is a text, or an object with the prompt's column or the messages'. The assistant's last answer is
    dropped: the model will write its own.
    """
    seen: set[str] = set()
    for path in find_files(section.paths, PATTERNS["jsonl"], "paths"):
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    where = f"{path}:{number}"
                    messages = _messages(_parse(raw, where), section, where)
                    if (name := json.dumps(messages)) not in seen:
                        seen.add(name)
                        yield Conversation(messages, where)


def _parse(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); JSON lines hold one text or object a line") from error


def _messages(value: Any, section: ResponsesSection, where: str) -> Messages:
    if isinstance(value, str):
        value = {section.prompt_field: value}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: {str(value)[:40]!r} is neither a text nor an object")
    if (found := value.get(section.messages_field)) is not None:
        messages = _checked(found, f"{where}: `{section.messages_field}`")
    else:
        text = value.get(section.prompt_field)
        if not isinstance(text, str) or not text.strip():
            known = ", ".join(map(str, value)) or "nothing"
            raise UserError(
                f"{where}: no text in `{section.prompt_field}` and no `{section.messages_field}`; the row has {known}: set "
                "responses.prompt_field or responses.messages_field"
            )
        messages = [{"role": "user", "content": text}]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{where}: nobody asks anything before the assistant's turn")
    if section.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": section.system}, *messages]
    return messages


def _checked(found: Any, where: str) -> Messages:
    if not isinstance(found, list):
        raise UserError(f"{where} is {str(found)[:40]!r}, not a list of messages")
    for number, message in enumerate(found):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{where}, message {number}: {str(message)[:60]!r} needs `role` and `content`, both of them text"
            )
    return [{"role": message["role"], "content": message["content"]} for message in found]
