"""`Trace`: the canvas of one request after each of its denoising steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.errors import UserError
from dlm.trace.events import ACCEPT, GIVEN, NEVER, NO_EVENTS, NO_GROWTH, REJECT, SET, Event, Later
from dlm.trace.facts import digest_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float16, Int32
    from numpy import ndarray

    from dlm.trace.pieces import Pieces

STATES_LIMIT = 2**28  # tokens `states` makes at most: 1 GiB


@dataclass(eq=False, kw_only=True)  # not frozen: that would triple the time it takes to make one
class Trace:
    """All denoising steps of one request. Do not modify it: it is not frozen only to be fast."""

    request_id: str
    mask_id: int
    num_steps: int
    first_step: Int32[ndarray, " l"]
    """Step at which each position first got a token; GIVEN, or NEVER."""
    first_token: Int32[ndarray, " l"]
    """That token; `mask_id` where there is none."""
    later: Later = NO_EVENTS
    growth: Int32[ndarray, "g 2"] = field(default_factory=NO_GROWTH.copy)
    """(step, length): the canvas has this length from this step's state on. The first has step -1."""
    accepted: Bool[ndarray, " l"] | None = None
    """Which first tokens were drafted ones."""
    confidence: Float16[ndarray, " l+m"] | None = None
    """Of each first token and then of each later event; NaN where unknown."""
    topk_tokens: Int32[ndarray, "l+m k"] | None = None
    """The likeliest tokens, best first; -1 where unknown."""
    topk_logits: Float16[ndarray, "l+m k"] | None = None
    digests: bytes = b""
    """Eight bytes a step: `digest_of` the canvas the sampler had."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Facts of this request alone: seed, sample, parent."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Facts that many requests share: model, sampler, versions; a store keeps them once."""
    at: int = 0
    """Ticks of 0.1 ms since 1970 at which a store took it."""
    source: Callable[[str], Pieces | None] | None = None
    """From a tokenizer's digest to its pieces."""

    @property
    def meta(self) -> dict[str, Any]:
        """All facts of the request."""
        return {**self.context, **self.own}

    @cached_property
    def pieces(self) -> Pieces | None:
        """The text of each token, where the store knows the tokenizer that the facts name. May be set."""
        tokenizer = self.meta.get("tokenizer")
        return None if self.source is None or not isinstance(tokenizer, str) else self.source(tokenizer)

    @property
    def length(self) -> int:
        """Positions of the final canvas."""
        return len(self.first_step)

    @property
    def prompt_length(self) -> int:
        """Tokens given before the first generated one."""
        made = self.first_step != GIVEN
        return int(made.argmax()) if made.any() else self.length

    @cached_property
    def tokens(self) -> Int32[ndarray, " l"]:
        """The canvas after the last step."""
        return self.state(self.num_steps) if len(self.later) else self.first_token

    @cached_property
    def steps(self) -> Int32[ndarray, " l"]:
        """The step, from 0, at which each token was committed (the last time, if it was masked again); -1 if never."""
        steps = np.where(self.first_step == NEVER, GIVEN, self.first_step)
        commits = (self.later.kind == SET) | (self.later.kind == ACCEPT)
        steps[self.later.position[commits]] = self.later.step[commits]
        return steps

    def state(self, k: int) -> Int32[ndarray, " l"]:
        """The canvas after `k` steps: 0 is the start, -1 the end. Positions that it has not yet are masks."""
        k = self._index(k)
        if k == self.num_steps and not len(self.later):
            return self.first_token.copy()
        state = np.where(self.first_step < k, self.first_token, np.int32(self.mask_id))
        if len(self.later):
            change = (self.later.kind != REJECT) & (self.later.step < k)
            state[self.later.position[change]] = self.later.token[change]  # of equal positions the last one stays
        return state

    def states(self) -> Int32[ndarray, "steps+1 l"]:
        """All canvases, the first before any step."""
        if (self.num_steps + 1) * self.length > STATES_LIMIT:
            count = f"{self.num_steps + 1} states of {self.length} tokens"
            raise UserError(f"{count} are more than fit in 1 GiB: take them one by one with state(k)")
        # Shifting a negative number right sets all its bits: faster than np.where.
        mask = np.int32(self.mask_id)
        states = self.first_step - np.arange(self.num_steps + 1, dtype=np.int32)[:, None]
        states >>= 31
        states &= self.first_token ^ mask
        states ^= mask
        for step, position, kind, token in zip(*map(np.ndarray.tolist, self.later), strict=True):
            if kind != REJECT:
                states[step + 1 :, position] = token
        return states

    def length_at(self, k: int) -> int:
        """Positions the canvas had after `k` steps."""
        reached = self.growth[self.growth[:, 0] < self._index(k)]
        return int(reached[-1, 1]) if len(reached) else self.length

    def events(self) -> list[Event]:
        """Every change in the order it happened; within a step by position."""
        first = np.flatnonzero((self.first_step >= 0) & (self.first_step != NEVER))
        kind = np.zeros(self.length, np.int32) if self.accepted is None else self.accepted * np.int32(ACCEPT)
        columns = [self.first_step[first], first, kind[first], self.first_token[first], first]
        more = [*self.later, np.arange(len(self.later)) + self.length]
        step, position, kinds, token, row = (np.concatenate(pair) for pair in zip(columns, more, strict=True))
        order = np.lexsort((row >= self.length, position, step))
        known = [None] * len(row) if self.confidence is None else [float(c) for c in self.confidence[row]]
        rows = np.stack((step, position, kinds, token))[:, order].T.tolist()
        return [Event._make((*row, _none_if_nan(known[i]))) for row, i in zip(rows, order, strict=True)]

    def check(self) -> None:
        """Compare the states with the digests the recorder took of the sampler's own canvases, if it took any."""
        for k in range(1, len(self.digests) // 8 + 1):
            if digest_of(self.state(k)[: self.length_at(k)]) != self.digests[8 * k - 8 : 8 * k]:
                raise UserError(f"trace {self.request_id[:60]!r}: state {k} is not the canvas the sampler had")

    def text(self, k: int = -1, generated: bool = False) -> str:
        """The canvas after `k` steps as text, masks as ░; token ids where their pieces are not known."""
        state = self.state(k)[: self.length_at(k)]
        state = state[self.first_step[: len(state)] != GIVEN] if generated else state
        if self.pieces is not None:
            return self.pieces.text(state.tolist(), self.mask_id)
        return " ".join("░" if token == self.mask_id else str(token) for token in state.tolist())

    def _index(self, k: int) -> int:
        if not -self.num_steps - 1 <= k <= self.num_steps:
            raise UserError(f"trace {self.request_id[:60]!r} has states 0 to {self.num_steps}, there is no {k}")
        return k % (self.num_steps + 1)

    def _repr_html_(self) -> str:
        from dlm.trace.view import frame

        return frame(self)

    def __repr__(self) -> str:
        events = f"{self.num_steps} steps, {len(self.later)} later events"
        return f"Trace({self.request_id!r}, {self.length} tokens, {events})"


def _none_if_nan(value: float | None) -> float | None:
    return None if value is None or value != value else value
