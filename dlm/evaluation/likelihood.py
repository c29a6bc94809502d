"""How likely a model finds an answer: exact where that is cheap, else drawn, with its error. Reads token ids, no text.

Of a diffusion model it is the negative evidence bound, NELBO = E over orders s of sum_i -log p(x_s(i) | x_s(<i)), and every
estimator in use is one of it: with k of L tokens masked at random, L/k times their cross-entropy (LLaDA, arXiv 2502.09992,
eq. 6). All orders together weigh each set of k masked tokens 1 / (k C(L, k)): a short answer has few sets, and is exact.
A block-causal model's bound is the sum of its blocks', each given the clean text before it (BD3-LM, arXiv 2503.09573).
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dlm.evaluation.draws import Likelihood, Plan, Span, plan_of, standard_error, widened
from dlm.models.lm import LM
from dlm.training.scoring import masked_nats, need_token, sequence_nats

ROUND = 8
"""Draws between two looks at whether the best of several answers is decided."""
DECIDED = 4.0
"""Standard errors between the best and each other answer that end the drawing."""
ROWS = 16
"""Sequences in a forward, at most. Only answers of one context share one, so a result does not depend on the others."""


def likelihoods(
    lm: LM, spans: Sequence[Span], *, draws: int = 32, seed: int = 0, rows: int = ROWS, early: bool = False
) -> list[Likelihood]:
    """What each answer costs, in the order of `spans`.

    Causal families: exact, one forward. Else an answer, or a block of one, is enumerated where its 2^L - 1 sets of masked
    tokens are no more than `draws`, and the others are drawn (`draws`). With `early`, drawing for the answers of one context ends once each other one is
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
    todo = [(plan, row) for plan in plans for row in range(len(plan.costs), min(max(end, plan.least), len(plan.masks)))]
    todo.sort(key=lambda one: len(one[0].span.ids))
    for _, same in groupby(todo, key=lambda one: len(one[0].span.ids)):
        wanted = list(same)
        for first in range(0, len(wanted), rows):
            part = wanted[first : first + rows]
            for (plan, _), costs in zip(part, _costs(lm, part), strict=True):
                plan.costs.append(costs)


@torch.no_grad()
def masked_costs(lm: LM, plan: Plan, numbers: Sequence[int]) -> list[np.ndarray]:
    """What each token costs in these forwards of a plan, (tokens,) each, 0 where it is not masked."""
    rows = [(plan, number) for number in numbers]
    return [costs for first in range(0, len(rows), ROWS) for costs in _costs(lm, rows[first : first + ROWS])]


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
    difference, number = other.nats * other_scale - best.nats * scale, len(best.samples)
    if number and number == len(other.samples):
        error = standard_error(np.array(other.samples) * other_scale - np.array(best.samples) * scale)
    else:
        number = min((one.known for one in (best, other) if one.error), default=0)
        error = float(np.hypot(best.error * scale, other.error * other_scale))
    return difference > (errors * error * widened(number) if error else 0.0)


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
