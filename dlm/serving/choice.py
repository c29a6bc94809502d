"""One answer of a request as it grows: its text from the engine's events, cut where the request says."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlm.inference.decoding import Decoding, stop_ids
from dlm.inference.events import Event, Times
from dlm.inference.recording import MASK, REPLACE, SET
from dlm.inference.request import Generation
from dlm.inference.texts import TextStream
from dlm.models.lm import LM
from dlm.serving.ask import Ask
from dlm.serving.echo import Token, piece
from dlm.serving.notes import Note


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What an event adds to an answer."""

    text: str = ""
    tokens: Sequence[Token] = ()
    finish_reason: str | None = None


@dataclass(eq=False)
class Choice:
    """The answer with one number. `feed` it all events of its request; the sum of the deltas is its text."""

    lm: LM
    ask: Ask
    number: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[Token] = field(default_factory=list)
    """The same with log-probabilities, for requests that ask for them."""
    finish_reason: str | None = None
    result: Generation | None = None
    times: Times = field(default_factory=Times)
    nfe: int = 0
    cached: int = 0
    """Tokens of its prompt whose keys were there already."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between its deltas."""
    _last: float | None = None
    """When the last one came."""
    _likeliest: dict[int, Sequence[tuple[int, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decoding: Decoding = self.ask.decodings[self.number]
        canvas = self.decoding.request.gen_length
        cuts = self.ask.kind == "text" and self.ask.cap is not None and self.ask.cap < canvas
        self._cut = TextStream(self.lm, self.decoding.stop_texts) if cuts else None
        """Where the answer is shorter than its canvas: the text of the tokens that count."""

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None

    def begin(self) -> Delta:
        """What stands before the answer."""
        self.text, self.scored = self.ask.echoes[self.number], list(self.ask.scored[self.number])
        return Delta(text=self.text, tokens=self.scored)

    def note(self, note: Note) -> None:
        """Remember what only steps tell: forwards, and the likeliest tokens of what they committed."""
        self.nfe = max(self.nfe, note.nfe)
        if note.likeliest is not None and note.confidence is not None:
            ids, logits = note.likeliest
            for row, (position, token, p) in enumerate(zip(note.positions, note.tokens, note.confidence, strict=True)):
                self._likeliest[position] = _log_softmax(ids[row].tolist(), logits[row].tolist(), token, p)

    def feed(self, event: Event) -> Delta:
        """What this event adds. Nothing once the answer is complete."""
        if event.result is not None:
            self.result, self.nfe = event.result, event.result.nfe
        if self.done:
            return Delta()
        self.times, self.cached = event.times, event.cached
        if self.ask.kind != "text":
            return self._whole(event)
        return self._part(event) if self._cut is None else self._capped(event, self._cut)

    def _part(self, event: Event) -> Delta:
        """The engine's own text."""
        tokens = self._tokens(event.tokens, event.confidence)
        reason = None if event.result is None else _reason(event.result)
        return self._add(event.text, event.tokens, tokens, reason)

    def _capped(self, event: Event, stream: TextStream) -> Delta:
        """The text of the first tokens, as many as the request wants."""
        assert self.ask.cap is not None
        room = self.ask.cap - len(self.tokens)
        ids = event.tokens[:room]
        full = len(ids) == room
        ended = event.result is not None and len(event.tokens) <= room and event.result.finish_reason == "stop"
        last = full or event.result is not None
        tokens = self._tokens(ids, event.confidence)
        return self._add(stream.add(ids, last), ids, tokens, None if not last else "stop" if ended else "length")

    def _whole(self, event: Event) -> Delta:
        """Holes: their text comes at once."""
        if event.result is None:
            return Delta()
        ids, text, reason = list(event.result.tokens), event.result.text, "length"
        if self.ask.kind == "suffix":
            ids, text, reason = self._middle(event.result)
        tokens = self._tokens(ids, event.confidence)
        return self._add(text, ids, tokens, reason)

    def _middle(self, result: Generation) -> tuple[list[int], str, str]:
        """What fills the hole before a suffix, up to end-of-text, a stop string or the cap."""
        ids, ends = list(result.tokens), stop_ids(self.lm)
        ended = next((place for place, token in enumerate(ids) if token in ends), None)
        kept, reason = (ids, "length") if ended is None else (ids[: ended + 1], "stop")
        cap = self.ask.cap
        if cap is not None and len(kept) > cap:
            kept, reason = kept[:cap], "length"
        before = list(self.decoding.request.ids[: self.decoding.request.holes[0].start])
        shown = kept[:-1] if reason == "stop" else kept
        start, whole = self.lm.decode(before), self.lm.decode([*before, *shown])
        text = whole.removeprefix(start) if whole.startswith(start) else self.lm.decode(shown)
        stops = self.ask.body.stop or ()
        stops = (stops,) if isinstance(stops, str) else stops
        places = [place for place in map(text.find, stops) if place >= 0]
        return (kept, text[: min(places)], "stop") if places else (kept, text, reason)

    def _add(self, text: str, ids: Sequence[int], tokens: Sequence[Token], reason: str | None) -> Delta:
        if text:
            now = time.monotonic()
            self.gaps += [] if self._last is None else [now - self._last]
            self._last = now
        self.text += text
        self.tokens += ids
        self.scored += tokens
        self.finish_reason = reason
        return Delta(text=text, tokens=tokens, finish_reason=reason)

    def _tokens(self, ids: Sequence[int], confidence: Sequence[float] | None) -> list[Token]:
        """Tokens with their log-probabilities, where the request wants them."""
        if self.ask.top is None or confidence is None:
            return []
        request = self.decoding.request
        holes = [position for hole in request.holes for position in hole]
        first = len(request.ids) + len(self.tokens)
        found = []
        for number, (token, p) in enumerate(zip(ids, confidence, strict=False)):
            position = holes[len(self.tokens) + number] if holes else first + number
            best = self._likeliest.get(position, ())[: self.ask.top]
            found.append(
                Token(
                    id=token,
                    text=piece(self.lm, token),
                    logprob=_log(p),
                    likeliest=[(piece(self.lm, other), value) for other, value in best],
                )
            )
        return found

    def step(self, note: Note) -> dict[str, Any]:
        """A step as `stream_mode = "denoise"` tells it: [position, id, text, p] of each token."""
        p = note.confidence or [None] * len(note.positions)
        rows = [
            (kind, [position, token, piece(self.lm, token), None if sure is None or sure != sure else round(sure, 4)])
            for position, token, kind, sure in zip(note.positions, note.tokens, note.kinds, p, strict=True)
        ]
        return {
            "step": note.step,
            "nfe": note.nfe,
            "commit": [row for kind, row in rows if kind == SET],
            "edit": [row for kind, row in rows if kind == REPLACE],
            "remask": [row[0] for kind, row in rows if kind == MASK],
        }

    def layout(self) -> dict[str, Any]:
        """Where its tokens go: the first chunk of `stream_mode = "denoise"`."""
        request = self.decoding.request
        holes = [[hole.start, hole.stop] for hole in request.holes]
        first = len(request.ids)
        return {"prompt_tokens": first, "holes": holes or [[first, first + request.gen_length]], "seed": request.seed}

    def facts(self) -> dict[str, Any]:
        """What we tell beside OpenAI's fields."""
        request, times = self.decoding.request, self.times
        spans = {"queue_ms": times.started, "first_ms": times.first_block}
        nfe = self.nfe + (self.ask.forwards[self.number] if self.ask.forwards else 0)
        facts: dict[str, Any] = {"nfe": nfe, "tpf": round(len(self.tokens) / max(nfe, 1), 4)}
        facts |= {"seed": request.seed, "sample": request.sample}
        facts |= {
            name: None if at is None else round(1000 * max(0.0, at - times.queued), 3) for name, at in spans.items()
        }
        if self.result is not None and self.result.holes is not None and self.ask.kind == "infill":
            facts["holes"] = self.result.holes
        if self.result is not None and self.result.attempts is not None:
            facts |= {"attempts": self.result.attempts, "passed": self.result.passed}
        if self.ask.top is not None:
            facts["logprobs_kind"] = "at_commit"
        return facts


def _reason(result: Generation) -> str:
    return "stop" if result.finish_reason == "stop" else "length"


def _log(p: float) -> float:
    """log p; JSON has no infinity."""
    return math.log(p) if p > 0 else -9999.0


def _log_softmax(ids: Sequence[int], logits: Sequence[float], token: int, p: float) -> list[tuple[int, float]]:
    """log p of the likeliest tokens, from their logits and p of one of them; the token alone where it is none of them."""
    if token not in ids or not p > 0:
        return [(token, _log(p))]
    known, shift = math.log(p), math.log(p) - logits[ids.index(token)]
    pairs = [pair for pair in zip(ids, logits, strict=True) if pair[0] >= 0]
    return [(other, known if other == token else logit + shift) for other, logit in pairs]  # equal where the same
