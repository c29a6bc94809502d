"""How likely a model finds an answer: exact where that is cheap, else drawn, with its error. Reads token ids, no text.

Of a diffusion model it is the negative evidence bound, NELBO = E over orders s of sum_i -log p(x_s(i) | x_s(<i)), and every
estimator in use is one of it: with k of L tokens masked at random, L/k times their cross-entropy (LLaDA, arXiv 2502.09992,
eq. 6). All orders together weigh each set of k masked tokens 1 / (k C(L, k)): a short answer has few sets, and is exact.
A block-causal model's bound is the sum of its blocks', each given the clean text before it (BD3-LM, arXiv 2503.09573).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from math import comb

import numpy as np
import torch
from torch import Tensor

from dlm.diffusion.rng import Purpose, uniform
from dlm.models.lm import LM
from dlm.training.scoring import masked_nats, need_token, sequence_nats

ROUND = 8
"""Draws between two looks at whether the best of several answers is decided."""
DECIDED = 4.0
"""Standard errors between the best and each other answer that end the drawing."""
ROWS = 16
"""Sequences in a forward, at most. Only answers of one context share one, so a result does not depend on the others."""


@dataclass(frozen=True)
class Span:
    """An answer in its context: the last `tokens` of `ids` are the answer, what stands before is given."""

    ids: tuple[int, ...]
    tokens: int
    address: int
    """Of its random numbers. Answers of one context share it, and so are masked alike."""

    @property
    def given(self) -> int:
        """Tokens before the answer."""
        return len(self.ids) - self.tokens


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What an answer costs."""

    nats: float
    """-log p, or for a diffusion model the bound on it."""
    error: float
    """Standard error of the draws; 0 where nothing was drawn."""
    draws: int
    """Forwards it took."""
    samples: tuple[float, ...] = ()
    """What each independent draw said of the bound; answers of one context compare draw by draw."""


def likelihoods(
    lm: LM, spans: Sequence[Span], *, draws: int = 32, seed: int = 0, rows: int = ROWS, early: bool = False
) -> list[Likelihood]:
    """What each answer costs, in the order of `spans`.

    Causal families: exact, one forward. Else an answer, or a block of one, is enumerated where its 2^L - 1 sets of masked
    tokens are no more than `draws`, and the others are drawn: in pairs that mask k and L + 1 - k tokens from both ends of
    one permutation, k stratified. With `early`, drawing for the answers of one context ends once each other one is
    `DECIDED` errors behind the best. Nothing here depends on the other contexts, nor on the order.
    """
    found: dict[int, Likelihood] = {}
    order = sorted(range(len(spans)), key=lambda i: (spans[i].ids[: spans[i].given], i))
    network = lm.network
    training = network.training
    network.eval()
    try:
        for _, chosen in groupby(order, key=lambda i: spans[i].ids[: spans[i].given]):
            numbers = list(chosen)
            # Sorted by what they say, so that a forward holds the same rows in whatever order they came.
            numbers.sort(key=lambda i: spans[i].ids)
            group = [spans[i] for i in numbers]
            costs = (
                _causal(lm, group)
                if network.attention.kind == "causal"
                else _bounds(lm, group, draws, seed, rows, early)
            )
            found.update(zip(numbers, costs, strict=True))
    finally:
        network.train(training)
    return [found[i] for i in range(len(spans))]


@torch.no_grad()
def _causal(lm: LM, spans: Sequence[Span]) -> list[Likelihood]:
    """Each alone: its first token is given, whatever the answer."""
    found = []
    for span in spans:
        nats = 0.0
        if span.tokens:
            ids = torch.tensor([span.ids], device=lm.device)
            answer = torch.arange(1, len(span.ids), device=lm.device)[None] >= span.given
            nats = float(sequence_nats(lm.network, ids[:, 1:], answer=answer, first=ids[:, 0]).double().sum())
        found.append(Likelihood(nats=nats, error=0.0, draws=min(1, span.tokens)))
    return found


@dataclass
class Plan:
    """Which tokens of one answer are masked in each forward, and what their cross-entropy weighs."""

    span: Span
    masks: np.ndarray
    """(forwards, tokens) bool."""
    weights: np.ndarray
    """(forwards, tokens)."""
    drawn: np.ndarray
    """(tokens,) bool: those whose block is drawn and not enumerated."""
    whole: int
    """Independent draws."""
    pairs: int
    """Forwards of each."""
    least: int
    """Forwards that enumerate."""
    sums: list[tuple[float, float]] = field(default_factory=list)
    """Of each forward that was run: what the enumerated and what the drawn blocks cost."""

    @property
    def done(self) -> bool:
        return len(self.sums) == len(self.masks)

    def samples(self) -> np.ndarray:
        """Independent draws so far."""
        values = np.array([drawn for _, drawn in self.sums[: self.whole * self.pairs]])
        whole = len(values) // self.pairs
        return values[: whole * self.pairs].reshape(whole, self.pairs).mean(1)

    def result(self) -> Likelihood:
        """What is known after the forwards so far."""
        samples, exact = self.samples(), sum(exact for exact, _ in self.sums)
        if not self.drawn.any():
            return Likelihood(nats=exact, error=0.0, draws=len(self.sums))
        values = tuple(float(exact + value) for value in samples)
        error = standard_error(samples)
        return Likelihood(nats=exact + float(samples.mean()), error=error, draws=len(self.sums), samples=values)


def standard_error(samples: np.ndarray) -> float:
    """Of their mean. Draws are stratified, which makes it err on the safe side, if at all."""
    return float(samples.std(ddof=1)) / len(samples) ** 0.5 if len(samples) > 1 else float("inf")


def plan_of(span: Span, block_length: int | None, draws: int, seed: int, most: int | None = None) -> Plan:
    """Masks and weights of an answer; `block_length` is None where there are no blocks.

    What has at most `most` sets of masked tokens is enumerated: no more than it would be drawn, unless given.
    """
    most = draws if most is None else most
    size = block_length or max(1, len(span.ids))
    place = np.arange(span.given, len(span.ids))
    blocks = [np.flatnonzero(place // size == b) for b in dict.fromkeys(place // size)]
    small = [block for block in blocks if 2 ** min(len(block), 30) - 1 <= most]
    large = [block for block in blocks if 2 ** min(len(block), 30) - 1 > most]
    pairs = 2 if draws >= 4 else 1
    whole = -(-draws // pairs) if large else 0
    least = max((2 ** len(block) - 1 for block in small), default=0)
    forwards = max(whole * pairs, least)
    masks, weights = np.zeros((forwards, span.tokens), bool), np.zeros((forwards, span.tokens))
    drawn = np.zeros(span.tokens, bool)
    for block in small:
        for row, chosen in enumerate(_subsets(len(block))):
            masks[row, block[list(chosen)]] = True
            weights[row, block[list(chosen)]] = 1 / (len(chosen) * comb(len(block), len(chosen)))
    times = _times(whole, span.address, seed)
    for block in large:
        drawn[block], length = True, len(block)
        number = uniform(
            Purpose.BOUND,
            seed=seed,
            sample=span.address,
            step=torch.arange(whole)[:, None],
            position=torch.from_numpy(place[block])[None],
        ).numpy()
        shift = 0.618034 * (block[0] // size)  # blocks of one answer need not all be masked much at once
        counts = np.floor((times + shift) % 1.0 * length).astype(int) + 1
        rank = number.argsort(1, kind="stable").argsort(1, kind="stable")
        for draw, count in enumerate(counts):
            ends = [(rank[draw] < count, count)]
            if pairs == 2:
                ends.append((rank[draw] >= count - 1, length + 1 - count))
            for row, (chosen, many) in enumerate(ends, start=draw * pairs):
                masks[row, block[chosen]], weights[row, block[chosen]] = True, length / many
    return Plan(span, masks, weights, drawn, whole, pairs, least)


def _subsets(length: int) -> Iterator[tuple[int, ...]]:
    """All sets of at least one of `length` tokens."""
    for count in range(1, length + 1):
        yield from combinations(range(length), count)


def _times(count: int, address: int, seed: int) -> np.ndarray:
    """Evenly spread over [0, 1) from a random start, in an order in which each beginning is spread evenly too."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits))  # van der Corput's order
    order = [value for value in reversed_bits if value < count]
    start = float(uniform(Purpose.BOUND, seed=seed, sample=address, token=1))
    return (start + np.array(order, float) / max(1, count)) % 1.0


@torch.no_grad()
def _bounds(lm: LM, spans: Sequence[Span], draws: int, seed: int, rows: int, early: bool) -> list[Likelihood]:
    """The answers of one context."""
    plans = [plan_of(span, lm.network.attention.block_length, draws, seed) for span in spans]
    in_rounds = early and len(plans) > 1
    end = 2 * ROUND if in_rounds else max(len(plan.masks) for plan in plans)
    while not all(plan.done for plan in plans):
        _run(lm, plans, end, rows)
        if in_rounds and decided(plans):
            break
        end += ROUND
    return [plan.result() for plan in plans]


def _run(lm: LM, plans: Sequence[Plan], end: int, rows: int) -> None:
    """The forwards of each answer that come before the one numbered `end`, and all enumerated ones."""
    todo = [(plan, row) for plan in plans for row in range(len(plan.sums), min(max(end, plan.least), len(plan.masks)))]
    todo.sort(key=lambda one: len(one[0].span.ids))
    for _, same in groupby(todo, key=lambda one: len(one[0].span.ids)):
        wanted = list(same)
        for first in range(0, len(wanted), rows):
            part = wanted[first : first + rows]
            for (plan, row), costs in zip(part, _costs(lm, part), strict=True):
                weighed = plan.weights[row] * costs
                plan.sums.append((float(weighed[~plan.drawn].sum()), float(weighed[plan.drawn].sum())))


def _costs(lm: LM, rows: Sequence[tuple[Plan, int]]) -> list[np.ndarray]:
    """Of each row the cross-entropy of each token of its answer, 0 where it is not masked."""
    ids = torch.tensor([plan.span.ids for plan, _ in rows])
    asked = torch.zeros(ids.shape, dtype=torch.bool)
    for line, (plan, row) in zip(asked, rows, strict=True):
        line[plan.span.given :] = torch.from_numpy(plan.masks[row])
    mask = need_token(lm.network, "mask_token_id", "a diffusion model is asked about masks")
    clean, where = ids.to(lm.device), asked.to(lm.device)
    shown = torch.where(where, mask, clean)
    losses: Tensor = torch.zeros(ids.shape, dtype=torch.float64)
    losses[asked] = masked_nats(lm.network, clean)(shown, where).double().cpu()
    return [line[plan.span.given :].numpy() for line, (plan, _) in zip(losses, rows, strict=True)]


def decided(plans: Sequence[Plan]) -> bool:
    """Whether the cheapest answer, in all and a token, is `DECIDED` errors better than each other one."""
    for scale in ([1.0] * len(plans), [1.0 / max(1, plan.span.tokens) for plan in plans]):
        results = [plan.result() for plan in plans]
        best = min(range(len(plans)), key=lambda i: results[i].nats * scale[i])
        for other in range(len(plans)):
            if other != best and not apart(results[best], results[other], scale[best], scale[other]):
                return False
    return True


def apart(
    best: Likelihood, other: Likelihood, scale: float = 1.0, other_scale: float = 1.0, errors: float = DECIDED
) -> bool:
    """Whether one answer is so many errors cheaper than another; drawn alike, their common luck does not count."""
    difference = other.nats * other_scale - best.nats * scale
    if best.samples and len(best.samples) == len(other.samples):
        error = standard_error(np.array(other.samples) * other_scale - np.array(best.samples) * scale)
    else:
        error = float(np.hypot(best.error * scale, other.error * other_scale))
    return difference > errors * error


@torch.no_grad()
def is_greedy(lm: LM, span: Span) -> bool:
    """Whether decoding one token a step, the most confident first, writes this answer; ends at the first difference.

    Block-causal families go block after block, causal ones from left to right.
    """
    ids = torch.tensor([span.ids], device=lm.device)
    spec = lm.network.attention
    if spec.kind == "causal":
        rows = torch.arange(ids.shape[1], device=lm.device)[None] >= span.given
        return bool((lm.predict(ids, rows).argmax(-1) == ids[rows]).all())
    size = spec.block_length or ids.shape[1]
    shown, hidden = ids.clone(), torch.zeros_like(ids, dtype=torch.bool)
    shown[:, span.given :] = need_token(lm.network, "mask_token_id", "a diffusion model is asked about masks")
    for first in range(span.given - span.given % size, ids.shape[1], size):
        end = min(first + size, ids.shape[1])
        hidden[:, max(first, span.given) : end] = True
        while hidden.any():
            best, token = lm.predict(shown[:, :end], hidden[:, :end]).float().softmax(-1).max(-1)
            at = hidden.nonzero()[int(best.argmax()), 1]  # ties go to the first
            if token[best.argmax()] != ids[0, at]:
                return False
            shown[0, at], hidden[0, at] = ids[0, at], False
    return True
