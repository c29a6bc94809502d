"""Holes of unknown length: `[MASK:4-16]` becomes the length that the model finds likeliest. Fills no hole itself.

CAL (arXiv 2602.00476): at the right length a model is surer of a hole's tokens, before it has written any, than at a
wrong one; but it is surer of every short hole. So its mean confidence is divided by what it would be at that length
anyhow. The paper fits that bias to each model beforehand. Here it is measured on the prompt itself, which then ends with
the hole: where nothing has to fit behind it, every length is as good, and only the bias is left.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.decoding import Decoding, infillings
from dlm.inference.engine import Engine
from dlm.inference.prompts import Piece, parse_holes, spell
from dlm.inference.request import Interrupted
from dlm.models.lm import LM

AT_ONCE = 16
"""Lengths of one hole that are tried side by side; of a wider range first so many, evenly spread, then around the best."""
DIGITS = 6
"""Of a score; what agrees in these is a tie, whatever rounding errors a batch brought."""

Probe = tuple[list[Piece], int]
"""A prompt without ranges, and the number of the piece whose length is tried."""
Score = tuple[float, float]
"""The calibrated confidence and, where it cannot tell, the confidence itself."""
Search = Generator[list[Probe], list[Score], tuple[str, int]]
Run = Callable[[list[Decoding]], Engine]
Sure = Mapping[str, Sequence[float]]
"""How sure the model was of the tokens of a request's holes when it committed them, by request id."""
Choice = tuple[list[str | list[int]], list[int]]
"""Prompts with every range replaced by one length, and the forwards that took, a prompt."""


def at_longest(prompts: Any) -> Any:
    """Prompts as users give them, every hole at its greatest length; `prompts` itself where none has a range."""
    several = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(several, (list, tuple)):
        return prompts
    longest, ranges = list(several), False
    for i, prompt in enumerate(several):
        pieces = parse_holes(prompt, f"prompt {i}") if isinstance(prompt, str) else []
        if any(piece.most for piece in pieces):
            longest[i] = spell([Piece(hole=piece.most) if piece.most else piece for piece in pieces])
            ranges = True
    return longest if ranges else prompts


def settle(lm: LM, prompts: Sequence[str | list[int]], run: Run) -> Choice:
    """The lengths of all holes, chosen; `run` gives an idle engine with room for these requests."""
    search, sure = choosing(lm, prompts), None
    while True:
        try:
            decodings = next(search) if sure is None else search.send(sure)
        except StopIteration as done:
            return done.value
        sure = _decoded(run(decodings), decodings)


def choosing(lm: LM, prompts: Sequence[str | list[int]]) -> Generator[list[Decoding], Sure, Choice]:
    """`settle` for whoever decodes by other means: yields requests of one step, and is sent how sure the model was.

    What is chosen for a prompt depends on it alone.
    """
    settled, forwards = list(prompts), [0] * len(prompts)
    searches: dict[int, Search] = {}
    wanted: dict[int, list[Probe]] = {}
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) and any(piece.most for piece in parse_holes(prompt, f"prompt {i}")):
            searches[i] = _search(parse_holes(prompt))
            wanted[i] = next(searches[i])
    while wanted:
        scores = yield from _scores(lm, [probe for probes in wanted.values() for probe in probes])
        for i, probes in list(wanted.items()):
            mine, scores = scores[: len(probes)], scores[len(probes) :]
            try:
                wanted[i] = searches[i].send(mine)
            except StopIteration as done:
                settled[i], forwards[i] = done.value
                del wanted[i]
    return settled, forwards


def _decoded(engine: Engine, decodings: Sequence[Decoding]) -> Sure:
    """How sure the model was, by an engine that has nothing else to do."""
    try:
        for decoding in decodings:
            engine.submit(decoding, confidence=True)
        events = list(engine.stream())
    except KeyboardInterrupt:
        raise Interrupted([]) from None  # what it holds is no result of the user's prompts
    for event in events:
        if event.error is not None:
            raise UserError(f"request {event.request_id!r}: {event.error}")
    return {event.request_id: event.confidence or () for event in events}


def _search(pieces: list[Piece]) -> Search:
    """One hole after the other, from the left; meanwhile those that follow have the middle of their range."""
    forwards = 0
    ranges = {i: (piece.hole, piece.most) for i, piece in enumerate(pieces) if piece.most}
    for i, (least, most) in ranges.items():
        pieces[i] = Piece(hole=(least + most) // 2)
    for i, (low, high) in ranges.items():
        known: dict[int, Score] = {}
        while True:
            sizes = sorted({round(size) for size in np.linspace(low, high, min(AT_ONCE, high - low + 1))} - set(known))
            probes = [([*pieces[:i], Piece(hole=size), *pieces[i + 1 :]], i) for size in sizes]
            known.update(zip(sizes, (yield probes), strict=True))
            forwards += 2 * len(probes)
            best = max(known, key=lambda size: (known[size], -size))
            low = max((size for size in known if size < best), default=best - 1) + 1
            high = min((size for size in known if size > best), default=best + 1) - 1
            if low > high or (low, high) == (best, best):
                break
        pieces[i] = Piece(hole=best)
    return spell(pieces), forwards


def _scores(lm: LM, probes: list[Probe]) -> Generator[list[Decoding], Sure, list[Score]]:
    """How sure the model is of each hole, over how sure it is where the prompt ends with it."""
    plain = SamplerConfig(**{**SamplerConfig().model_dump(), "steps": 1})  # all named: no recommendation of the model's
    whole, alone = (
        infillings(lm, [spell(pieces[: end(i)]) for pieces, i in probes], plain, where="infill()")
        for end in (lambda i: None, lambda i: i + 1)
    )
    decodings = []
    for number, ((pieces, i), *both) in enumerate(zip(probes, whole, alone, strict=True)):
        for name, decoding in zip(("whole", "alone"), both, strict=True):
            request = replace(decoding.request, request_id=f"{name} {number}")
            if name == "whole" and i == len(pieces) - 1 and lm.eos_id is not None:
                request = replace(request, ids=(*request.ids, lm.eos_id))  # a hole that ends the prompt ends the text
            decodings.append(replace(decoding, request=request))
    confidence = yield decodings
    scores = []
    for number, last in enumerate(alone):
        holes = last.request.holes  # the last one has this number in the whole prompt too
        start, size = sum(map(len, holes[:-1])), len(holes[-1])
        sure, bias = (
            float(np.mean(confidence[f"{name} {number}"][start : start + size])) for name in ("whole", "alone")
        )
        scores.append((round(sure / bias, DIGITS), round(sure, DIGITS)))
    return scores
