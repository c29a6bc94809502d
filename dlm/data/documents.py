"""Turns rows (texts or conversations) into documents (token ids, perhaps with a prompt mask)."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.data import chat
from dlm.data.config import DataConfig
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError

ENCODE_AT_ONCE = 256


@dataclass(frozen=True)
class Row:
    """One record of a source: its columns, the key its split is decided by, and where it stands, for errors."""

    value: Mapping[str, Any]
    key: str
    where: str


@dataclass(frozen=True)
class Document:
    """Ids (n,) and prompt mask (n,), True where a token is prompt; no mask means all of it is to be learned.

    `order` (n,) is the step at which a decoder committed each token, -1 where none did; traces have it.
    """

    ids: NDArray[np.int32]
    prompt: NDArray[np.bool_] | None = None
    order: NDArray[np.int32] | None = None


def text_of(row: Row, config: DataConfig) -> str:
    """The text columns of a row, joined by a newline."""
    plain = {field: "" if value is None else value for field, value in row.value.items()}  # null: "no text" in tables
    return "\n".join(chat.text_in(plain, field, f"{row.where}: data.text_fields") for field in config.text_fields)


def columns(config: DataConfig) -> tuple[str, ...]:
    """The columns of a row that are read."""
    if config.source != "chat":
        return config.text_fields
    if config.prompt_field is not None and config.response_field is not None:
        return (config.prompt_field, config.response_field)
    return (config.messages_field or "messages",)


def content(row: Row, config: DataConfig) -> str:
    """The columns that are read, as one string; rows that differ only in other columns are the same document."""
    return json.dumps({field: row.value.get(field) for field in columns(config)}, sort_keys=True, default=str)


def encode_rows(rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer) -> list[Document]:
    """The documents of rows; each ends with end-of-text, which counts as answer. Empty texts are left out."""
    end = end_of_text(tokenizer)
    if config.source == "chat":
        return [_conversation(row, config, tokenizer, end) for row in rows]
    texts = [t for t in (text_of(row, config) for row in rows) if t]
    return [Document(np.array([*ids, end], np.int32)) for ids in tokenizer.encode_batch(texts, special=False)]


def encode_all(rows: Iterable[Row], config: DataConfig, tokenizer: Tokenizer) -> Iterator[Document]:
    """`encode_rows`, a few hundred at a time."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, ENCODE_AT_ONCE)):
        yield from encode_rows(chunk, config, tokenizer)


def _conversation(row: Row, config: DataConfig, tokenizer: Tokenizer, end: int) -> Document:
    messages = chat.messages_of(row.value, config.messages_field, config.prompt_field, config.response_field, row.where)
    try:
        pieces = chat.split_turns(messages, tokenizer.apply_chat_template, config.answers)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    ids, prompt = chat.encode_turns(pieces, lambda text: without_masks(text, tokenizer, tokenizer.mask_token))
    return Document(np.append(ids, np.int32(end)), np.append(prompt, False))


def without_masks(text: str, tokenizer: Tokenizer, mask: str | None) -> list[int]:
    """Token ids of a text. Names of special tokens become those tokens, except the mask's: a corpus has no masks."""
    if mask is None or mask not in text:
        return tokenizer.encode(text)
    spelled = tokenizer.encode(mask, special=False)
    parts = tokenizer.encode_batch(text.split(mask))
    return [i for number, part in enumerate(parts) for i in ([*spelled, *part] if number else part)]


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id that ends documents and pads rows."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer names no end-of-text token: set eos_token in its tokenizer_config.json")
    return tokenizer.eos_token_id
