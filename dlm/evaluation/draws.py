"""Which tokens of an answer are masked in each forward, what that weighs, and how sure the result is. Asks no model.

An answer of few tokens has few sets of masked ones, and each is asked. Of a longer one draws come in groups of eight. A
group masks eight counts k, spread evenly over 1 to L, and its sets are one fixed design whose tokens change places at
random: so each set of k tokens is as likely as any other, which is all that an unbiased estimate needs, while the design
lets no token be masked much more often than others. That is what lowers the spread: some tokens cost ten times others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from math import comb

import numpy as np
import torch

from dlm.diffusion.rng import Purpose, uniform

GROUP = 8
"""Draws whose masks are made together."""
Z95 = 1.959964


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
    """What each pair of draws said of the bound; answers of one context compare pair by pair."""
    known: int = 0
    """Values that `error` was reckoned from."""

    @property
    def interval(self) -> tuple[float, float]:
        """Where `nats` lies at 95 %, by Student's quantiles: few draws know their own spread badly."""
        half = Z95 * self.error * widened(self.known) if self.error else 0.0
        return self.nats - half, self.nats + half


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
    """Samples: pairs of draws, or single ones where there are few."""
    pairs: int
    """Forwards of each."""
    least: int
    """Forwards that enumerate."""
    blocks: list[np.ndarray]
    """Tokens of each block that is drawn."""
    costs: list[np.ndarray] = field(default_factory=list)
    """Of each forward that was run: the cross-entropy of each token, 0 where it is not masked."""

    @property
    def done(self) -> bool:
        return len(self.costs) == len(self.masks)

    def samples(self) -> np.ndarray:
        """What each pair said so far."""
        return self._pairs(self.weights * self.drawn, self.costs)

    def _pairs(self, weights: np.ndarray, values: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        whole = min(len(values) // self.pairs, self.whole)
        rows = whole * self.pairs
        each = (weights[:rows] * np.array(values[:rows])).sum(1) if rows else np.zeros(0)
        return each.reshape(whole, self.pairs).mean(1)

    def result(self) -> Likelihood:
        """What is known after the forwards so far."""
        weights = self.weights[: len(self.costs)] * ~self.drawn
        exact = float((weights * np.array(self.costs)).sum()) if self.costs else 0.0
        if not self.drawn.any():
            return Likelihood(nats=exact, error=0.0, draws=len(self.costs))
        samples = self.samples()
        error, known = self.error(samples)
        return Likelihood(
            nats=exact + float(samples.mean()),
            error=error,
            draws=len(self.costs),
            samples=tuple(float(exact + value) for value in samples),
            known=known,
        )

    def error(self, samples: np.ndarray) -> tuple[float, int]:
        """Standard error of the mean of the samples, and how many values it was reckoned from.

        A cost is its token's mean and a rest. The design evens the means out: what is left of them is how unevenly a
        group weighs tokens, times how far their means are apart. The rests are taken for independent, with expectation 0.
        (Those of a group are not quite: the spread of its pairs about their mean is a third less than their squares say.)
        """
        rows = len(samples) * self.pairs
        masks, costs = self.masks[:rows], np.array(self.costs[:rows])
        counts = (masks * self.drawn).sum(0)
        freedom = counts.sum() - self.drawn.sum()
        if rows < GROUP or (counts[self.drawn] < 2).any():
            return standard_error(samples), len(samples)
        mean = (masks * costs).sum(0) / np.maximum(counts, 1)
        rest = masks * self.drawn * (costs - mean)
        uneven = 0.0
        for block in self.blocks:
            apart = mean[block].var(ddof=1)
            weight = np.add.reduceat(self.weights[:rows, block], np.arange(0, rows, GROUP)) / rows
            uneven += apart * ((weight - weight.mean(1, keepdims=True)) ** 2).sum()
        noise = ((self.weights[:rows] * rest / rows) ** 2).sum() * counts.sum() / freedom
        return float(np.sqrt(uneven + noise)), rows


def standard_error(samples: np.ndarray) -> float:
    """Of the mean of independent samples."""
    return float(samples.std(ddof=1)) / len(samples) ** 0.5 if len(samples) > 1 else float("inf")


def widened(samples: int) -> float:
    """Student's quantile at 97.5 % for so many samples, over the normal one's (Abramowitz and Stegun 26.7.5)."""
    n, z = samples - 1, Z95
    if n < 3:
        return {1: 12.706205, 2: 4.302653}.get(n, float("inf")) / z
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    last = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return (z + sum(term / n**power for power, term in enumerate((*terms, last), start=1))) / z


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
    for number, block in enumerate(large):
        drawn[block] = True
        for row, chosen in enumerate(
            _sets(whole * pairs, len(block), int(place[block[0]]), number, span.address, seed)
        ):
            masks[row, block[chosen]], weights[row, block[chosen]] = True, len(block) / len(chosen)
    return Plan(span, masks, weights, drawn, whole, pairs, least, large)


def _subsets(length: int) -> Iterator[tuple[int, ...]]:
    """All sets of at least one of `length` tokens."""
    for count in range(1, length + 1):
        yield from combinations(range(length), count)


def _sets(forwards: int, length: int, place: int, number: int, address: int, seed: int) -> Iterator[np.ndarray]:
    """The masked tokens of each forward, group by group; `number` is the block's, `place` its first token's."""
    groups = -(-forwards // GROUP)
    start = float(uniform(Purpose.BOUND, seed=seed, sample=address, token=1, position=place))
    for group, offset in enumerate(_spread(groups)):
        size = min(GROUP, forwards - group * GROUP)
        times = (np.arange(size) + (start + offset / groups) % 1.0) / size
        counts = tuple((np.floor(times * length).astype(int) + 1).tolist())
        keys = uniform(
            Purpose.BOUND, seed=seed, sample=address, step=group, position=torch.arange(place, place + length)
        )
        token = np.argsort(keys.numpy(), kind="stable")
        order = _ends(size) if number % 2 == 0 else _ends(size)[::-1]  # not all blocks are masked much at once
        design = _design(counts, length)
        for row in order:
            yield token[list(design[row])]


def _ends(size: int) -> list[int]:
    """Rows in pairs: the first and the last, the second and the last but one."""
    return [row for first in range(-(-size // 2)) for row in dict.fromkeys((first, size - 1 - first))]


@cache
def _design(counts: tuple[int, ...], length: int) -> tuple[tuple[int, ...], ...]:
    """For each of the rising counts k so many tokens of `length`: those that weigh least so far; each weighs 1/k."""
    weight, found = np.zeros(length), []
    for k in counts:
        chosen = np.argsort(weight, kind="stable")[:k]
        weight[chosen] += 1 / k
        found.append(tuple(chosen.tolist()))
    return tuple(found)


def _spread(count: int) -> list[int]:
    """Numbers under `count` in an order in which each beginning is spread evenly (van der Corput's)."""
    bits = max(1, (count - 1).bit_length())
    return [value for value in (int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits)) if value < count]
