"""The text of tokens: the bytes of each id of a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from dlm.errors import UserError
from dlm.trace.events import REDACTED

if TYPE_CHECKING:
    from jaxtyping import UInt32
    from numpy import ndarray

MASK_SIGN, REDACTED_SIGN, UNKNOWN_SIGN = "░", "▒", "�"
LIMIT = 2**26  # bytes of a whole vocabulary


class Pieces:
    """The bytes of every token: `ends` (v,) of each in `data`. Bytes, because a character may take several tokens."""

    def __init__(self, ends: UInt32[ndarray, " v"], data: bytes) -> None:
        self.ends, self.data = ends, data

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> Pieces:
        """From the bytes of each id in order."""
        pieces = list(pieces)
        return cls(np.cumsum([len(piece) for piece in pieces], dtype=np.uint32), b"".join(pieces))

    @classmethod
    def of_tokenizer(cls, tokenizer: str | Path) -> Pieces:
        """From the text of a tokenizer.json, or from the file or folder it is in."""
        if isinstance(tokenizer, Path) or not tokenizer.lstrip().startswith("{"):
            path = Path(tokenizer)
            path = path / "tokenizer.json" if path.is_dir() else path
            try:
                tokenizer = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{path}: no tokenizer.json can be read there: {error}") from None
        try:
            return cls.of(_vocabulary(json.loads(tokenizer)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"this tokenizer.json cannot be understood: {error!r}") from None

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, token: int) -> bytes:
        """The bytes of one token; U+FFFD for an unknown id."""
        if not 0 <= token < len(self.ends):
            return UNKNOWN_SIGN.encode()
        return self.data[int(self.ends[token - 1]) if token else 0 : int(self.ends[token])]

    def text(self, tokens: Sequence[int], mask_id: int | None = None) -> str:
        """The tokens as text, masks as ░ and redacted ones as ▒; bytes that are no UTF-8 come out as U+FFFD."""
        signs = {REDACTED: REDACTED_SIGN.encode()} | ({} if mask_id is None else {mask_id: MASK_SIGN.encode()})
        return b"".join(signs[token] if token in signs else self[token] for token in tokens).decode("utf-8", "replace")

    def to_bytes(self) -> bytes:
        """For a store: compressed."""
        sizes = np.diff(self.ends, prepend=np.uint32(0)).astype("<u4")
        head = len(sizes).to_bytes(4, "little")
        return zstandard.compress(head + sizes.view(np.uint8).reshape(-1, 4).T.tobytes() + self.data, 12)

    @classmethod
    def from_bytes(cls, data: bytes) -> Pieces:
        """What `to_bytes` made."""
        if zstandard.frame_content_size(data) > LIMIT:
            raise UserError(f"a vocabulary of more than {LIMIT} bytes")
        plain = zstandard.decompress(data)
        count = int.from_bytes(plain[:4], "little")
        planes = np.frombuffer(plain, np.uint8, 4 * count, 4).reshape(4, count)
        sizes = np.ascontiguousarray(planes.T).view("<u4")[:, 0]
        return cls(np.cumsum(sizes, dtype=np.uint32), plain[4 + 4 * count :])


def _vocabulary(tokenizer: dict[str, Any]) -> list[bytes]:
    """The bytes of each id, as the tokenizer's decoder writes them in the middle of a text."""
    model, decoder = tokenizer["model"], json.dumps(tokenizer.get("decoder"))
    vocab = model["vocab"]
    names = vocab if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
    added = {entry["id"]: entry["content"].encode() for entry in tokenizer.get("added_tokens") or ()}
    plain = _of_byte_level if "ByteLevel" in decoder else _of_sentencepiece
    found = {index: plain(name) for name, index in names.items()} | added
    return [found.get(index, b"") for index in range(max(found, default=-1) + 1)]


def _of_byte_level(name: str) -> bytes:
    """The bytes of a name in GPT-2's spelling, where a printable character stands for each byte."""
    letters = _byte_letters()
    return bytes(letters[letter] for letter in name) if all(letter in letters for letter in name) else name.encode()


def _of_sentencepiece(name: str) -> bytes:
    """The bytes of a SentencePiece name, where a block stands for a space and <0x0A> for a byte."""
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", name)
    return bytes.fromhex(byte[1]) if byte else name.replace("\u2581", " ").removeprefix("##").encode()


@cache
def _byte_letters() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}
