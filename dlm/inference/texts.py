"""Tokens made text: results of finished requests, and what may already be shown of those under way. Samples nothing."""

from collections.abc import Sequence
from itertools import groupby

from dlm.inference.request import Generation, Outcome, Request
from dlm.models.lm import LM

UNDECIDED = "░"


def result_of(lm: LM, request: Request, outcome: Outcome, stop: frozenset[int]) -> Generation:
    """A finished canvas as users see it."""
    return _filled(lm, request, outcome) if request.holes else _continued(lm, request, outcome, stop)


def partial_of(lm: LM, request: Request, outcome: Outcome, masked: Sequence[bool]) -> Generation:
    """An unfinished canvas as users see it: masks as ░, without those that follow the last token of a continuation."""
    filled = bool(request.holes)
    start, end = len(request.ids), min(len(outcome.ids), len(request.ids) + request.gen_length)
    positions = [at for hole in request.holes for at in hole] or list(range(start, end))
    while not filled and positions and masked[positions[-1]]:
        positions.pop()
    text = ""
    if lm.tokenizer is not None:
        shown = range(len(outcome.ids)) if filled else positions
        for undecided, run in groupby(shown, key=lambda at: masked[at]):
            tokens = [outcome.ids[at] for at in run]
            text += UNDECIDED * len(tokens) if undecided else lm.decode(tokens)
    decided = sum(not masked[at] for at in positions)
    return Generation(
        text=text,
        tokens=[outcome.ids[at] for at in positions],
        nfe=outcome.nfe,
        tpf=decided / outcome.nfe,
        finish_reason="interrupted",
        request_id=request.request_id,
        sample=request.sample,
        steps=[outcome.when[at] for at in positions],
    )


class TextStream:
    """The text of tokens that come a few at a time, left to right: what was once shown never changes."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.tokens: list[int] = []
        self.shown = ""

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The new text; an unfinished character waits for the rest of its bytes, unless these are the `last` tokens."""
        self.tokens += tokens
        if self.lm.tokenizer is None:
            return ""
        text = self.lm.decode(self.tokens)
        if not last:
            text = text.rstrip("\ufffd")
        if not text.startswith(self.shown):
            return ""
        new = text[len(self.shown) :]
        self.shown = text
        return new


def _continued(lm: LM, request: Request, outcome: Outcome, stop: frozenset[int]) -> Generation:
    start, end = len(request.ids), len(request.ids) + request.gen_length
    tokens = list(outcome.ids[start:end])
    ended = next((i for i, token in enumerate(tokens) if token in stop), None)
    if ended is not None:
        tokens = tokens[: ended + 1]
    return Generation(
        text="" if lm.tokenizer is None else lm.decode(tokens),
        tokens=tokens,
        nfe=outcome.nfe,
        tpf=len(tokens) / outcome.nfe,
        finish_reason="length" if ended is None else "stop",
        request_id=request.request_id,
        sample=request.sample,
        steps=list(outcome.when[start : start + len(tokens)]),
    )


def _filled(lm: LM, request: Request, outcome: Outcome) -> Generation:
    positions = [position for hole in request.holes for position in hole]
    holes = [_decode_hole(lm, outcome.ids, hole) for hole in request.holes]
    if request.pieces is None:
        text = "" if lm.tokenizer is None else lm.decode(outcome.ids)
    else:
        text = "".join(piece + hole for piece, hole in zip(request.pieces, [*holes, ""], strict=True))
    return Generation(
        text=text,
        tokens=[outcome.ids[position] for position in positions],
        nfe=outcome.nfe,
        tpf=len(positions) / outcome.nfe,
        finish_reason="length",
        request_id=request.request_id,
        sample=request.sample,
        holes=holes,
        steps=[outcome.when[position] for position in positions],
    )


def _decode_hole(lm: LM, ids: Sequence[int], hole: range) -> str:
    """A hole's text as it reads after what stands before it: some tokenizers drop a text's first space."""
    if lm.tokenizer is None:
        return ""
    before, after = lm.decode(ids[: hole.start]), lm.decode(ids[: hole.stop])
    return after.removeprefix(before) if after.startswith(before) else lm.decode(ids[hole.start : hole.stop])
