"""Two runs over the same items: how much better one is, and whether that may be chance."""

from collections.abc import Sequence
from itertools import pairwise
from math import comb
from typing import Any

import numpy as np

RESAMPLED = 10_000


Sizes = tuple[Sequence[float], Sequence[float]]


def paired(ours: Sequence[float], theirs: Sequence[float], seed: int = 0, sizes: Sizes | None = None) -> dict[str, Any]:
    """The difference of the means with its bootstrap interval at 95 %; of right and wrong answers also McNemar's exact p.

    With `sizes`, such as bytes, of our items and of theirs a mean is the sum of the values over the sum of the sizes.
    """
    values = np.asarray(ours, float), np.asarray(theirs, float)
    difference, count = values[0] - values[1], len(values[0])
    over = [np.ones(count)] * 2 if sizes is None else [np.asarray(size, float) for size in sizes]

    def mean(chosen: Any) -> Any:
        first, second = (
            v[chosen].sum(-1) / np.maximum(s[chosen].sum(-1), 1) for v, s in zip(values, over, strict=True)
        )
        return first - second

    found: dict[str, Any] = {"difference": float(mean(slice(None))), "items": count}
    if count > 1:
        drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLED, count))
        low, high = np.quantile(mean(drawn), [0.025, 0.975])
        found |= {"low": float(low), "high": float(high)}
    if sizes is None and set(ours) | set(theirs) <= {0.0, 1.0}:
        better, worse = int((difference > 0).sum()), int((difference < 0).sum())
        found |= {"better": better, "worse": worse, "p": mcnemar(better, worse)}
    return found


def mcnemar(better: int, worse: int) -> float:
    """The chance that a fair coin splits the items on which two runs differ as unevenly, exact and two-sided."""
    total, few = better + worse, min(better, worse)
    tail = sum(comb(total, k) for k in range(few + 1)) / 2**total
    return min(1.0, 2 * tail)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Numbers of the points (tokens a forward, quality) that no other equals in both and exceeds in one."""
    return [
        i
        for i, (tpf, quality) in enumerate(points)
        if not any(t >= tpf and q >= quality and (t > tpf or q > quality) for t, q in points)
    ]


def aup(points: Sequence[tuple[float, float]], best: float | None = None, alpha: float = 3.0) -> float | None:
    """Accuracy under parallelism: the area under quality, in percent, over tokens a forward (d3LLM, arXiv 2601.07568).

    It begins at the point with the least TPF. A quality y counts exp(-alpha (1 - y / best)) of itself, where `best` is the
    best quality of any method on the task (none: the best one here), and points more than 5 percentage points under the
    first do not count. None of no points.
    """
    ordered = sorted(points)
    if not ordered:
        return None
    best = 100 * (max(quality for _, quality in ordered) if best is None else best)
    kept = [(tpf, quality * 100) for tpf, quality in ordered if quality * 100 >= ordered[0][1] * 100 - 5]
    first_tpf, first_quality = kept[0]
    area = first_tpf * first_quality
    for (t0, q0), (t1, q1) in pairwise(kept):
        weights = [min(1.0, float(np.exp(-alpha * (1 - q / best)))) if best else 0.0 for q in (q0, q1)]
        area += (t1 - t0) * (q0 * weights[0] + q1 * weights[1]) / 2
    return area
