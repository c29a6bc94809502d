"""Tokens made text: results of finished requests, and what may already be shown of those under way. Samples nothing."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby, pairwise

from dlm.inference.decoding import Decoding
from dlm.inference.request import Generation, Outcome, Request
from dlm.models.lm import LM

UNDECIDED = "░"


def result_of(lm: LM, decoding: Decoding, outcome: Outcome) -> Generation:
    """A finished canvas as users see it."""
    return _filled(lm, decoding.request, outcome) if decoding.request.holes else _continued(lm, decoding, outcome)


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
    """The text of tokens that come a few at a time, left to right: what was once shown never changes.

    None of the `stop` strings is ever shown, nor an end of the text that may turn out to be the beginning of one.
    """

    def __init__(self, lm: LM, stop: Sequence[str] = ()) -> None:
        self.lm, self.stop = lm, stop
        self.tokens: list[int] = []
        self.shown = ""

    def completes(self, tokens: Sequence[int]) -> bool:
        """Whether a stop string stands in the text as soon as these tokens follow."""
        return bool(self.stop) and _first(self.lm.decode([*self.tokens, *tokens]), self.stop) is not None

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The new text. Until the `last` tokens come, an unfinished character and a possible stop string wait."""
        self.tokens += tokens
        if self.lm.tokenizer is None:
            return ""
        text = self.lm.decode(self.tokens)
        text = text[: _first(text, self.stop)]
        if not last:
            text = text.rstrip("\ufffd")
            text = text[: len(text) - _held(text, self.stop)]
        if not text.startswith(self.shown):
            return ""
        new = text[len(self.shown) :]
        self.shown = text
        return new


def _first(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins."""
    return min((at for at in map(text.find, stop) if at >= 0), default=None)


def _held(text: str, stop: Sequence[str]) -> int:
    """How many of the last characters are the beginning of a stop string; the longest one counts."""
    sizes = (size for part in stop for size in range(1, min(len(part), len(text) + 1)) if text.endswith(part[:size]))
    return max(sizes, default=0)


def _continued(lm: LM, decoding: Decoding, outcome: Outcome) -> Generation:
    request, stop = decoding.request, decoding.stop
    start, end = len(request.ids), len(request.ids) + request.gen_length
    tokens = list(outcome.ids[start:end])
    ended = next((i for i, token in enumerate(tokens) if token in stop), None)
    if ended is not None:
        tokens = tokens[: ended + 1]
    text = "" if lm.tokenizer is None else lm.decode(tokens)
    if decoding.stop_texts and _first(text, decoding.stop_texts) is not None:
        # The fewest tokens that spell a stop string, so that it does not matter how many were committed at a time.
        sizes = range(1, len(tokens) + 1)
        ended = bisect_left(
            sizes, True, key=lambda size: _first(lm.decode(tokens[:size]), decoding.stop_texts) is not None
        )
        tokens = tokens[: ended + 1]
        text = lm.decode(tokens)
        text = text[: _first(text, decoding.stop_texts)]
    return Generation(
        text=text,
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


def parted(lm: LM, ids: Sequence[int], holes: Sequence[range]) -> tuple[list[str], list[str]]:
    """The text between the holes, and that in them, as it reads in one piece."""
    cuts = [0, *(at for hole in holes for at in (hole.start, hole.stop)), len(ids)]
    parts = [_decode_hole(lm, ids, range(*cut)) for cut in pairwise(cuts)]
    return parts[::2], parts[1::2]


def _decode_hole(lm: LM, ids: Sequence[int], hole: range) -> str:
    """A hole's text as it reads after what stands before it: some tokenizers drop a text's first space."""
    if lm.tokenizer is None:
        return ""
    before, after = lm.decode(ids[: hole.start]), lm.decode(ids[: hole.stop])
    return after.removeprefix(before) if after.startswith(before) else lm.decode(ids[hole.start : hole.stop])
