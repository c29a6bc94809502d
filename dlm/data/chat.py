"""Conversations: rendered by a template, and marked token by token as prompt or answer."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import UserError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# For tokenizers without chat tokens: plain lines, as a base model may have seen them; answers end with end-of-text.
PLAIN = (
    "{% for m in messages %}{{ m['role'].capitalize() + ': ' + m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' else '' }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)

MOST_CHARACTERS = 64_000  # of a template; published ones have a few thousand
MOST_SAID = 500  # characters of a template's error that our message repeats
Pieces = list[tuple[str, bool]]
"""A conversation as (text, whether it is an answer): each piece is wholly prompt or wholly answer."""


def read_template(file: Path) -> str:
    """The text of a chat_template.jinja."""
    try:
        if file.stat().st_size <= MOST_CHARACTERS:
            return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    raise UserError(f"{file} has {file.stat().st_size:,} bytes; the limit for a chat template is {MOST_CHARACTERS:,}")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    names: Mapping[str, str] | None = None,
    source: str = "the chat template",
) -> str:
    """The conversation as one string; `source` names the template in errors.

    Templates come with checkpoints, so they run in a sandbox with limits (see dlm.data.template).
    """
    from dlm.data import template as jinja

    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"message {number} is {reprlib.repr(message)}: it needs `role` and `content`")
    if len(template) > MOST_CHARACTERS:
        raise UserError(f"{source} has {len(template):,} characters; the limit is {MOST_CHARACTERS:,}")
    try:
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return jinja.render(template, {**(names or {}), **given})
    except RecursionError as error:
        raise UserError(f"{source} cannot render this conversation: it is nested too deeply or calls itself") from error
    except jinja.FAILURES as error:
        number = getattr(error, "lineno", None)
        line = f" (line {number})" if isinstance(number, int) else ""
        reason = str(error) or type(error).__name__
        raise UserError(f"{source} cannot render this conversation: {reason[:MOST_SAID]}{line}") from error


def split_turns(messages: Sequence[Mapping[str, Any]], rendered: Callable[..., str], answers: str = "all") -> Pieces:
    """The rendered conversation, cut where an assistant's message begins and ends.

    `rendered(messages, add_generation_prompt)` is the tokenizer's template. An answer starts right after the generation
    prompt, so training sees exactly the boundary that decoding will; it ends before the newline that follows its end token.
    """
    turns = [i for i, m in enumerate(messages) if isinstance(m, Mapping) and m.get("role") == "assistant"]
    if not turns:
        raise UserError("the conversation has no assistant turn, so there is nothing to train on")
    pieces: Pieces = []
    done = ""
    for i in turns if answers == "all" else turns[-1:]:
        before = rendered(messages[:i], True)
        after = rendered(messages[: i + 1], False).rstrip("\n")
        if not before.startswith(done) or not after.startswith(before):
            raise UserError(
                f"the chat template changes earlier text when turn {i} is added, so answers cannot be marked: "
                'set data.answers = "last", or use a template that only appends'
            )
        pieces += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return pieces


def encode_turns(pieces: Pieces, encode: Callable[[str], list[int]]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Ids and prompt mask (True = prompt), both (length,). Pieces are encoded apart: no token straddles a boundary."""
    ids: list[int] = []
    prompt: list[bool] = []
    for text, is_answer in pieces:
        piece = encode(text)
        ids += piece
        prompt += [not is_answer] * len(piece)
    return np.array(ids, np.int32), np.array(prompt, np.bool_)


def messages_of(
    row: Mapping[str, Any], messages_field: str | None, prompt_field: str | None, response_field: str | None, where: str
) -> list[dict[str, Any]]:
    """The conversation a row holds; `where` names the row in errors."""
    if prompt_field is not None and response_field is not None:
        return [
            {"role": "user", "content": text_in(row, prompt_field, where)},
            {"role": "assistant", "content": text_in(row, response_field, where)},
        ]
    field = messages_field or "messages"
    value = _column(row, field, where)
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: `{field}` is {str(value)[:60]!r}, not a list of {{role, content}}")
    return [dict(m) if isinstance(m, Mapping) else m for m in value]


def text_in(row: Mapping[str, Any], field: str, where: str) -> str:
    value = _column(row, field, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: `{field}` is {type(value).__name__}, not text")
    return value


def _column(row: Mapping[str, Any], field: str, where: str) -> Any:
    if field not in row:
        raise UserError(f"{where}: no field `{field}`; the row has {', '.join(map(str, row))}")
    return row[field]
