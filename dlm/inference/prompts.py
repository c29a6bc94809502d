"""Prompts as users write them, made requests: text or token ids, with or without holes. Knows nothing of sampling."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlm.errors import UserError
from dlm.inference.request import Request
from dlm.models.lm import LM

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids or, where it is to be continued, a conversation of messages {"role": …, "content": …}."""

HOLE = re.compile(r"(?P<escape>\\)?\[MASK(?::(?P<length>[^\]\s]{1,20}))?\]")
MAX_HOLE = 65_536


@dataclass(frozen=True)
class Piece:
    """A stretch of a text prompt: `hole` masks, or text; `plain` text is never read as a special token."""

    text: str = ""
    hole: int = 0
    plain: bool = False
    most: int = 0
    """Of a hole that may have any length from `hole` to this; 0 where it has just that one."""


def parse_holes(text: str, where: str = "prompt") -> list[Piece]:
    """Cut a text at its holes. `[MASK:12]` is twelve tokens, `[MASK]` one; neighbouring `[MASK]` are one hole.

    `[MASK:4-16]` is a hole of four to sixteen tokens. `\\[MASK:12]` means those characters themselves.
    """
    pieces: list[Piece] = []
    at, bare = 0, False  # `bare`: the last piece is a hole of single masks
    for found in HOLE.finditer(text):
        if found.start() > at:
            pieces.append(Piece(text[at : found.start()]))
        at = found.end()
        if found["escape"]:
            pieces.append(Piece(found.group()[1:], plain=True))
            continue
        if found["length"] is None and bare and pieces[-1].hole:
            pieces[-1] = Piece(hole=pieces[-1].hole + 1)
            continue
        bare = found["length"] is None
        least, most = (1, 1) if bare else _hole_lengths(found["length"], found.group(), where)
        pieces.append(Piece(hole=least, most=most if most > least else 0))
    return [*pieces, Piece(text[at:])] if at < len(text) else pieces


def spell(pieces: Sequence[Piece]) -> str:
    """The text that `parse_holes` cuts into these pieces."""
    return "".join(
        f"[MASK:{p.hole}{f'-{p.most}' if p.most else ''}]" if p.hole else f"\\{p.text}" if p.plain else p.text
        for p in pieces
    )


def _hole_lengths(digits: str, spelt: str, where: str) -> tuple[int, int]:
    """The least and the most tokens of a hole."""
    words = digits.split("-")
    least, *_, most = [int(word) if word.isascii() and word.isdecimal() else -1 for word in (*words, words[-1])]
    if not (len(words) <= 2 and 1 <= least <= most <= MAX_HOLE):
        raise UserError(
            f"{where}: {spelt}: a hole's length must be a number from 1 to {MAX_HOLE}, as in [MASK:12], or two of them "
            f"between which it is chosen, the smaller one first, as in [MASK:4-16]; for these very characters write \\{spelt}"
        )
    return least, most


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """A list of prompts from what users give: strings, id lists, arrays, or a single one of these."""
    if isinstance(prompts, str):
        return [_as_prompt(prompts, "prompt 0")]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts must be strings or lists of token ids, not {type(prompts).__name__}")
    if prompts and all(_is_id(entry) for entry in prompts):
        prompts = [prompts]
    return [_as_prompt(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]


def continuation(lm: LM, prompt: str | list[int], gen_length: int, where: str, **fields: Any) -> Request:
    """A request to write on after `prompt`; a text begins as the tokenizer has texts begin, token ids stay as they are."""
    ids: list[int] = []
    if isinstance(prompt, str):
        for piece in parse_holes(prompt, where):
            if piece.hole:
                raise _has_hole(where)
            ids += _encode(lm, piece, where)
        ids = lm.require_tokenizer().begun(ids) if ids else ids
    else:
        ids = prompt
    _check_ids(lm, ids, where)
    if lm.mask_id is not None and lm.mask_id in ids and lm.config.attention != "causal":
        raise _has_hole(where)
    if not ids and lm.config.shifted_logits:
        raise UserError(
            f"{where} is empty, and {lm.config.model_type} predicts each token from the one before it: give at least one"
        )
    return Request(ids=tuple(ids), gen_length=gen_length, **fields)


def infilling(lm: LM, prompt: str | list[int], where: str, **fields: Any) -> Request:
    """A request to fill the holes of `prompt`: as parsed in a text, which begins as with `continuation`; runs of mask ids in a list."""
    mask = lm.require_mask_id()
    ids: list[int] = []
    holes: list[range] = []
    texts: list[str] | None = None
    if isinstance(prompt, str):
        texts, spelt = [""], False
        for piece in parse_holes(prompt, where):
            if piece.most:
                raise UserError(
                    f"{where}: {spell([piece])}: one request has holes of one length each: dlm.infill chooses among several"
                )
            encoded = [mask] * piece.hole if piece.hole else _encode(lm, piece, where)
            found = [range(piece.hole)] if piece.hole else list(runs(encoded, mask))
            holes += [range(len(ids) + hole.start, len(ids) + hole.stop) for hole in found]
            ids += encoded
            spelt = spelt or (bool(found) and not piece.hole)  # as the tokenizer spells its mask
            texts += [""] * (piece.hole > 0)
            texts[-1] += piece.text
        if spelt:
            texts = None  # the text between such holes is known as tokens only
        begun = ids if lm.tokenizer is None else lm.tokenizer.begun(ids)
        holes = [range(hole.start + len(begun) - len(ids), hole.stop + len(begun) - len(ids)) for hole in holes]
        ids = begun
    else:
        ids, holes = prompt, list(runs(prompt, mask))
    _check_ids(lm, ids, where)
    if not holes:
        spelt = "[MASK:12] (a hole of twelve tokens)" if isinstance(prompt, str) else f"its mask id, {mask}"
        raise UserError(f"{where} has no hole to fill: mark one with {spelt}, or use dlm.generate to continue it")
    if lm.config.shifted_logits and holes[0].start == 0:
        raise UserError(
            f"{where} begins with a hole, and {lm.config.model_type} predicts each token from the one before it: "
            "put at least one token first"
        )
    return Request(ids=tuple(ids), holes=tuple(holes), pieces=None if texts is None else tuple(texts), **fields)


def runs(ids: Sequence[int], mask: int) -> Iterator[range]:
    """The stretches of masks in a list of ids."""
    start = None
    for position, token in enumerate((*ids, -1)):
        if token == mask and start is None:
            start = position
        elif token != mask and start is not None:
            yield range(start, position)
            start = None


def _is_id(entry: Any) -> bool:
    return hasattr(entry, "__index__") and not isinstance(entry, bool) and getattr(entry, "ndim", 0) == 0


def _as_prompt(prompt: Any, where: str) -> str | list[int]:
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where} is no Unicode text: character {error.start} is {ascii(prompt[error.start])[1:-1]}, half of a "
                "surrogate pair"
            ) from None
        return prompt
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or not all(_is_id(token) for token in prompt):
        raise UserError(f"{where} must be a string or a list of token ids, not {str(prompt)[:60]!r}")
    return [int(token) for token in prompt]


def _encode(lm: LM, piece: Piece, where: str) -> list[int]:
    if lm.tokenizer is None:
        raise UserError(
            f"{where} is text, but model {lm.name!r} has no tokenizer: put a tokenizer.json into its folder, or give token ids"
        )
    return list(lm.tokenizer.encode(piece.text, special=not piece.plain))


def _check_ids(lm: LM, ids: Sequence[int], where: str) -> None:
    for position, token in enumerate(ids):
        if not 0 <= token < lm.config.vocab_size:
            raise UserError(
                f"{where}: token id {token} at position {position} lies outside "
                f"the vocabulary of {lm.config.vocab_size} tokens"
            )


def _has_hole(where: str) -> UserError:
    return UserError(
        f"{where} holds mask tokens: fill them with dlm.infill, or write \\[MASK] for those characters themselves"
    )
