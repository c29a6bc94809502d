"""`dlm.score`: what texts cost a model in nats. Reads texts; `likelihood` reckons."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from dlm.data.documents import without_masks
from dlm.errors import UserError
from dlm.evaluation.draws import Span
from dlm.evaluation.likelihood import likelihoods
from dlm.models.lm import LM
from dlm.models.required import require_lm
from dlm.training.scoring import need_token


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a model needs to write a text, or a continuation of one."""

    nats: float
    """-log p of the scored text or, of a diffusion model, an upper bound on it: exact, or an unbiased estimate."""
    error: float
    """Standard error of that estimate; 0 where `nats` is exact. See `interval` for few draws."""
    tokens: int
    """Tokens scored."""
    bytes: int
    """UTF-8 bytes of the scored text."""
    interval: tuple[float, float] = (0.0, 0.0)
    """Where `nats` lies at 95 %, by Student's quantiles: wider than 1.96 errors where draws are few."""

    @property
    def bits_per_byte(self) -> float:
        """NaN for an empty text."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


def score(
    lm: LM,
    texts: str | Sequence[str | Sequence[int] | tuple[str, str] | tuple[Sequence[int], Sequence[int]]],
    *,
    draws: int = 32,
    batch_size: int = 16,
    seed: int = 0,
) -> list[Score]:
    """-log p of each text, or of each continuation given its context, in nats; scores are in the order of `texts`.

    `texts` are strings, or pairs (context, continuation); lists of token ids stand for texts too. Both parts of a pair are tokenised together and cut where the
    context ends, as lm-eval does: white space that ends the context counts to the continuation, which likes to begin
    with it. Where a token would reach over the cut, the parts are tokenised apart. A text without a context follows
    end-of-text if the model predicts each token from the one before it (causal families, Dream, Fast-dLLM v2).
    Names of special tokens are read as these, but for the mask's, which is text here.

    Causal families: exact, one forward. Diffusion families: the negative evidence bound (LLaDA, arXiv 2502.09992, eq. 6),
    of block-causal ones block after block, each given the clean text before it (BD3-LM, arXiv 2503.09573). An answer, or
    a block, of L tokens is exact where all its 2^L - 1 sets of masked tokens are at most `draws`; else it is the mean of
    `draws` draws, with its error. Logits are the family's own: LLaDA's keep the mask among the tokens. Which
    tokens a draw masks depends on `seed` and the context (where it is empty, the text) alone: neither on the order of
    `texts` nor on `batch_size`, the sequences in one forward, and continuations of one context are masked alike.

    Raises UserError for what is no text, and for a text longer than the model's context.
    """
    require_lm(lm, "score()")
    for name, value, least in (("draws", draws, 2), ("batch_size", batch_size, 1)):
        if value < least:
            why = ": one draw has no standard error" if name == "draws" else ""
            raise UserError(f"score(): {name} = {value} must be at least {least}{why}")
    items = [_item(lm, text, f"text {i}") for i, text in enumerate(_listed(texts))]
    found = likelihoods(lm, [item.span for item in items], draws=draws, seed=seed, rows=batch_size)
    return [
        Score(nats=one.nats, error=one.error, interval=one.interval, tokens=item.span.tokens, bytes=item.bytes)
        for one, item in zip(found, items, strict=True)
    ]


@dataclass(frozen=True)
class _Item:
    """A text to score, and the bytes of what is scored."""

    span: Span
    bytes: int


def _listed(texts: object) -> Sequence[object]:
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Sequence):
        raise UserError(f"texts must be a list of strings or pairs (context, continuation), not {type(texts).__name__}")
    if isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(text, str) for text in texts):
        raise UserError("texts is a single pair: write [(context, continuation)], or a list for two texts")
    return texts


def _item(lm: LM, text: object, where: str) -> _Item:
    alone = isinstance(text, str) or _is_ids(text)
    pair: Any = (text[:0], text) if alone else text  # pyright: ignore[reportIndexIssue]
    kinds = [str if isinstance(part, str) else list if _is_ids(part) else None for part in _parts(pair)]
    if len(kinds) != 2 or None in kinds or kinds[0] != kinds[1]:
        raise UserError(
            f"{where} is {str(text)[:60]!r}: give a string, or a pair of them (context, continuation); or token ids"
        )
    context, scored = pair
    if kinds[0] is str:
        before, after, size = _tokens(lm, context, scored, where)
    else:
        before, after = [int(token) for token in context], [int(token) for token in scored]
        _require_known(lm, [*before, *after], where)
        size = 0 if lm.tokenizer is None else len(lm.decode(after, skip_special=False).encode())
    return _Item(span_of(lm, before, after, where, own_address=not len(context)), size)


def span_of(
    lm: LM, before: list[int], after: list[int], where: str, *, own_address: bool = False, room: int = 0
) -> Span:
    """An answer's ids in their context; what predicts each token from the one before it begins with end-of-text.

    Raises UserError where they are more than `room` tokens longer than the model's context. Its random numbers are those of its context, or
    (`own_address`) its own.
    """
    spec, config = lm.network.attention, lm.config
    if after and not before and (spec.kind == "causal" or config.shifted_logits):
        why = f"{config.model_type} predicts each token from the one before it, the first one from end-of-text"
        before = [need_token(lm.network, "eos_token_id", why)]
    length, limit = len(before) + len(after) - room, config.context_length
    if length > limit:
        raise UserError(f"{where} has {length} tokens, but model {lm.name!r} a context of {limit}: score it in parts")
    address = blake2b(repr(after if own_address else before).encode(), digest_size=4).digest()
    return Span(ids=(*before, *after), tokens=len(after), address=int.from_bytes(address, "little"))


def _parts(pair: Any) -> Sequence[Any]:
    return pair if isinstance(pair, (tuple, list)) else ()


def _is_ids(value: object) -> bool:
    """A list or a tuple of token ids; an empty one too."""
    return isinstance(value, (list, tuple)) and all(type(token) is int for token in value)


def _require_known(lm: LM, ids: Sequence[int], where: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < lm.config.vocab_size), None)
    if wrong is not None:
        raise UserError(f"{where}: token {wrong} is none of the model's: they go from 0 to {lm.config.vocab_size - 1}")


def _tokens(lm: LM, context: str, text: str, where: str) -> tuple[list[int], list[int], int]:
    """Ids of the context and of what is scored, and the bytes of that."""
    for part in (context, text):
        if any("\ud800" <= character <= "\udfff" for character in part):
            raise UserError(f"{where} holds a lone surrogate, which is no character: {part[:60]!r}")
    if not text:
        return encode_text(lm, context), [], 0
    bare = context.rstrip()
    text = context[len(bare) :] + text
    before, whole = encode_text(lm, bare), encode_text(lm, bare + text)
    joined = len(whole) > len(before) and whole[: len(before)] == before
    return before, whole[len(before) :] if joined else encode_text(lm, text), len(text.encode())


def encode_text(lm: LM, text: str) -> list[int]:
    """Ids of a text; what is spelt like the mask is text."""
    tokenizer = lm.require_tokenizer()
    mask = None if lm.mask_id is None else tokenizer.backend.id_to_token(lm.mask_id)
    return without_masks(text, tokenizer, mask)
