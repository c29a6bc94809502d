"""`best_of`: several fillings of the same holes, of which the one stays that the model itself finds likeliest.

A filling is judged by its pseudo-likelihood (Salazar et al., arXiv 1910.14659): the sum of log p of each token of the holes
given all the others, and of the NEAR tokens on both sides of each hole, which a filling that fits makes likelier too. That is
one row of a forward for each of these tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dlm.inference.decoding import Decoding
from dlm.inference.request import Generation, Interrupted
from dlm.models.lm import LM

NEAR = 4
"""Tokens beside a hole that judge what fills it."""
WARMTH = 0.7
"""Temperature of the candidates that are drawn beside a greedy one."""
APART = 2**16
"""Between the sample numbers of a request's candidates; no call asks for more samples."""
ROWS = 64
"""Rows of a forward that judges."""
DIGITS = 4
"""Of a judgement, in nats; what agrees in these is a tie, and the first one stays."""


@dataclass(frozen=True)
class Choice:
    """The candidate that stays, as a request of its own, and what the choice took."""

    decoding: Decoding
    forwards: int


def choose(lm: LM, decodings: Sequence[Decoding], run: Callable[[list[Decoding]], list[Generation]]) -> list[Choice]:
    """Of each request's `best_of` candidates the best; `run` decodes requests. What is chosen for one depends on it alone."""
    each = [_candidates(decoding) for decoding in decodings]
    flat = [candidate for candidates in each for candidate in candidates if len(candidates) > 1]
    named = [replace(one, request=replace(one.request, request_id=str(number))) for number, one in enumerate(flat)]
    try:
        results = iter(run(named) if named else [])
    except KeyboardInterrupt:
        raise Interrupted([]) from None  # what it holds is no result of the user's prompts
    found = []
    for candidates in each:
        scores, forwards = [0.0], 0
        if len(candidates) > 1:
            filled = [next(results) for _ in candidates]
            judged = [_judged(lm, candidate, result) for candidate, result in zip(candidates, filled, strict=True)]
            scores = [round(score, DIGITS) for score, _ in judged]
            forwards = sum(result.nfe for result in filled) + sum(rows for _, rows in judged)
        best = scores.index(max(scores))
        found.append(Choice(candidates[best], forwards - (filled[best].nfe if forwards else 0)))
    return found


def _candidates(decoding: Decoding) -> list[Decoding]:
    """As it was asked for and, beside it, drawn with other random numbers."""
    count, request = decoding.settings.best_of, decoding.request
    settings = decoding.settings.model_copy(update={"best_of": 1})  # what stays is a request like any other
    drawn = settings.model_copy(update={"temperature": settings.temperature or WARMTH})
    others = [
        replace(decoding, settings=drawn, request=replace(request, sample=request.sample + number * APART))
        for number in range(1, count)
    ]
    return [replace(decoding, settings=settings), *others]


def _judged(lm: LM, decoding: Decoding, result: Generation) -> tuple[float, int]:
    """The judgement of a filling, in nats, and how many rows of forwards it took."""
    ids, holes = list(decoding.request.ids), decoding.request.holes
    for at, token in zip((at for hole in holes for at in hole), result.tokens, strict=True):
        ids[at] = token
    first = int(lm.config.shifted_logits)
    near = {at for hole in holes for at in range(max(first, hole.start - NEAR), min(len(ids), hole.stop + NEAR))}
    places, total = sorted(near), 0.0
    for start in range(0, len(places), ROWS):
        rows = places[start : start + ROWS]
        canvas = torch.tensor([ids] * len(rows), device=lm.device)
        asked = torch.zeros_like(canvas, dtype=torch.bool)
        asked[range(len(rows)), rows] = True
        with torch.inference_mode():
            logits = lm.predict(canvas.masked_fill(asked, lm.require_mask_id()), asked).float()
            p = logits.log_softmax(-1).gather(-1, canvas[asked][:, None])
        total += float(np.sum(p.double().cpu().numpy()))
    return total, len(places)
