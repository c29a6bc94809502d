"""`dlm.score`: what texts cost a model in nats. Tokenises and batches; the estimators are `dlm.diffusion.bound`'s."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from dlm.data.documents import without_masks
from dlm.diffusion.bound import estimate
from dlm.errors import UserError
from dlm.models.lm import LM
from dlm.models.required import require_lm
from dlm.training.scoring import need_token, sequence_nats


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a model needs to write a text, or a continuation of one."""

    nats: float
    """-log p of the scored text or, of a diffusion model, an unbiased estimate of an upper bound on it."""
    error: float
    """Standard error of that estimate; 0 where `nats` is exact."""
    tokens: int
    """Tokens scored."""
    bytes: int
    """UTF-8 bytes of the scored text."""

    @property
    def bits_per_byte(self) -> float:
        """NaN for an empty text."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


def score(
    lm: LM, texts: str | Sequence[str | tuple[str, str]], *, draws: int = 32, batch_size: int = 16, seed: int = 0
) -> list[Score]:
    """-log p of each text, or of each continuation given its context, in nats; scores are in the order of `texts`.

    `texts` are strings, or pairs (context, continuation). Both parts of a pair are tokenised together and cut where the
    context ends, as lm-eval does: white space that ends the context counts to the continuation, which likes to begin
    with it. Where a token would reach over the cut, the parts are tokenised apart. A text without a context follows
    end-of-text if the model predicts each token from the one before it (causal families, Dream, Fast-dLLM v2).
    Names of special tokens are read as these, but for the mask's, which is text here.

    Causal families: exact, one forward. Diffusion families: the mean of `draws` draws of the negative evidence bound
    (LLaDA, arXiv 2502.09992, eq. 6: k ~ U{1..L} of the L tokens are masked, and their cross-entropy counts L/k times),
    of block-causal families one block after the other, each given the clean text before it (BD3-LM, arXiv 2503.09573);
    a single token's is exact. Which tokens a draw masks depends on `seed` and the context (where it is empty, the text)
    alone: neither on the order of `texts` nor on `batch_size`, the number of texts in one forward, and continuations of
    one context are compared under the same masks.

    Raises UserError for what is no text, and for a text longer than the model's context.
    """
    require_lm(lm, "score()")
    for name, value, least in (("draws", draws, 2), ("batch_size", batch_size, 1)):
        if value < least:
            why = ": one draw has no standard error" if name == "draws" else ""
            raise UserError(f"score(): {name} = {value} must be at least {least}{why}")
    items = [_item(lm, text, f"text {i}") for i, text in enumerate(_listed(texts))]
    scores = [Score(nats=0.0, error=0.0, tokens=0, bytes=0)] * len(items)
    network = lm.network
    training = network.training
    network.eval()
    try:
        for chosen in _batches(items, batch_size):
            exact = items[chosen[0]].exact
            found = _nats(lm, [items[i] for i in chosen], 1 if exact else draws, seed)
            for i, values in zip(chosen, found.split(1), strict=True):
                tokens, size = items[i].tokens, items[i].bytes
                value = estimate(values, tokens, size, exact)
                scores[i] = Score(nats=value.nats, error=value.error or 0.0, tokens=tokens, bytes=size)
    finally:
        network.train(training)
    return scores


@dataclass(frozen=True)
class _Item:
    """A text to score: its last `tokens` ids are, the others are given."""

    ids: list[int]
    tokens: int
    bytes: int
    exact: bool
    """Whether one draw says it all: nothing is drawn, or each token is masked alone."""
    address: int
    """Of its random numbers."""


def _listed(texts: object) -> Sequence[object]:
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Sequence):
        raise UserError(f"texts must be a list of strings or pairs (context, continuation), not {type(texts).__name__}")
    if isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(text, str) for text in texts):
        raise UserError("texts is a single pair: write [(context, continuation)], or a list for two texts")
    return texts


def _item(lm: LM, text: object, where: str) -> _Item:
    pair: Any = ("", text) if isinstance(text, str) else text
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise UserError(f"{where} is {str(text)[:60]!r}: give a string, or a pair of them (context, continuation)")
    context, scored = pair
    before, after, size = _tokens(lm, context, scored, where)
    spec, config = lm.network.attention, lm.config
    if after and not before and (spec.kind == "causal" or config.shifted_logits):
        why = f"{config.model_type} predicts each token from the one before it, the first one from end-of-text"
        before = [need_token(lm.network, "eos_token_id", why)]
    length, limit = len(before) + len(after), config.context_length
    if length > limit:
        raise UserError(f"{where} has {length} tokens, but model {lm.name!r} a context of {limit}: score it in parts")
    address = blake2b(repr(before if context else after).encode(), digest_size=4).digest()
    exact = spec.kind == "causal" or 1 in (len(after), spec.block_length)
    return _Item(before + after, len(after), size, exact, int.from_bytes(address, "little"))


def _tokens(lm: LM, context: str, text: str, where: str) -> tuple[list[int], list[int], int]:
    """Ids of the context and of what is scored, and the bytes of that."""
    for part in (context, text):
        if any("\ud800" <= character <= "\udfff" for character in part):
            raise UserError(f"{where} holds a lone surrogate, which is no character: {part[:60]!r}")
    if not text:
        return _encode(lm, context), [], 0
    bare = context.rstrip()
    text = context[len(bare) :] + text
    before, whole = _encode(lm, bare), _encode(lm, bare + text)
    joined = len(whole) > len(before) and whole[: len(before)] == before
    return before, whole[len(before) :] if joined else _encode(lm, text), len(text.encode())


def _encode(lm: LM, text: str) -> list[int]:
    """Ids of a text; what is spelt like the mask is text."""
    tokenizer = lm.require_tokenizer()
    mask = None if lm.mask_id is None else tokenizer.backend.id_to_token(lm.mask_id)
    return without_masks(text, tokenizer, mask)


def _batches(items: Sequence[_Item], size: int) -> Iterator[list[int]]:
    """Numbers of the items that have anything to score: the exact ones apart, those of about one length together."""
    for exact in (True, False):
        order = [i for i, item in enumerate(items) if item.tokens and item.exact is exact]
        order.sort(key=lambda i: len(items[i].ids))
        yield from (order[start : start + size] for start in range(0, len(order), size))


@torch.no_grad()
def _nats(lm: LM, items: Sequence[_Item], draws: int, seed: int) -> Tensor:
    """(items, draws), or one column where it is exact."""
    lengths = torch.tensor([len(item.ids) for item in items])
    ids = torch.zeros(len(items), int(lengths.max()), dtype=torch.long)
    for row, item in zip(ids, items, strict=True):
        row[: len(item.ids)] = torch.tensor(item.ids)
    place = torch.arange(ids.shape[1])
    valid = place < lengths[:, None]
    answer = valid & (place >= lengths[:, None] - torch.tensor([[item.tokens] for item in items]))
    first = None
    if lm.network.attention.kind == "causal":  # what stands first is given: it is no text's to predict
        first, ids, valid, answer = ids[:, 0].to(lm.device), ids[:, 1:], valid[:, 1:], answer[:, 1:]
    index = torch.tensor([item.address for item in items])
    ids, answer, valid, index = (x.to(lm.device) for x in (ids, answer, valid, index))
    found = sequence_nats(
        lm.network,
        ids,
        answer=answer,
        index=index,
        samples=draws,
        seed=seed,
        valid=None if bool(valid.all()) else valid,
        first=first,
    )
    return found.cpu()
