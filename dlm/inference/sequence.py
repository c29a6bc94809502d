"""A request under way: its canvas, its pages, its strategy, and who listens to it."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dlm.inference.canvas import Canvas, Decision, OpenBlock
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.decoding import Decoding
from dlm.inference.events import Event, Log, Times
from dlm.inference.page_table import PageTable
from dlm.inference.plan import Block as Positions
from dlm.inference.request import Outcome, Request
from dlm.inference.strategies.block import Block
from dlm.models.config import ModelConfig

if TYPE_CHECKING:
    from dlm.inference.parking import Parked
    from dlm.inference.recording import Recorder
    from dlm.inference.scheduler import Scheduled
    from dlm.inference.strategies.strategy import Strategy
    from dlm.inference.texts import TextStream


class Script(Protocol):
    """Has the last word on a request's decisions."""

    def decision(self, seq: "Sequence", proposed: Decision) -> Decision:
        """What the request does in the step it has come to, where its strategy proposes this."""
        ...

    def leads(self, step: int) -> bool:
        """Whether that step is decided here: no stop string ends the request before."""
        ...


@dataclass(eq=False)
class Sequence:
    """What an engine keeps of a request from its submission to its end."""

    decoding: Decoding
    text: "TextStream"
    """What was given out of its text."""
    config: ModelConfig
    engine: EngineConfig
    strategy: "Strategy"
    number: int = 0
    """In order of arrival."""
    step: int = 0
    nfe: int = 0
    waited: int = 0
    """Steps of the engine since it last took part."""
    script: Script | None = None
    recorder: "Recorder | None" = None
    keep: frozenset[str] = frozenset()
    """What decisions carry beside tokens: "confidence", "topk"."""
    topk: int = 0
    """How many of the likeliest tokens, where they carry them."""
    log: Log = field(default_factory=Log)
    times: Times = field(default_factory=Times)
    final: Event | None = None
    """Its last event."""
    deadline: float | None = None
    """On `time.monotonic`'s clock."""
    blocks: Iterator[Positions] = field(default_factory=lambda: iter(()))
    """Those still to come."""
    memory: Any = None
    """What its strategy remembers of it beside these."""
    parked: "Parked | None" = None
    attempt: int = 1
    """How often its holes are being filled, this time counted."""
    passed: bool | None = None
    """Whether the last attempt passed its check."""
    latest: "tuple[tuple, Scheduled] | None" = None
    """What it ran last, and the state in which it will run just that again; see `Scheduler`."""

    def __post_init__(self) -> None:
        plan, settings = self.decoding.plan, self.decoding.settings
        self._blank()
        self.shift = int(self.config.shifted_logits)
        self.attention_block = {"bidirectional": None, "causal": 1}.get(self.config.attention, self.config.block_length)
        """Block length of its attention; None sees everything, 1 is causal."""
        if plan.aligned and not self.request.holes:
            self.attention_block = plan.length_of_block(None)
        self.revises = settings.edit_threshold is not None or settings.remask_threshold is not None
        """Whether committed tokens of open blocks may still change."""
        self.done = not self.strategy.begin(self)

    def _blank(self) -> None:
        """A canvas on which nothing is decided, and no pages."""
        # Causal families have no mask: what stands at the position being predicted is then of no consequence.
        self.canvas = Canvas(self.request, self.decoding.plan.length(self.request), self.config.mask_token_id or 0)
        self.pages = PageTable(self.strategy.branches(self))

    def begin_again(self, settings: SamplerConfig) -> None:
        """Forget what was decided, and go on with the next step on a blank canvas. Its pages were given back."""
        watched = self.canvas.confidence is not None
        self.decoding = replace(self.decoding, settings=settings)
        self.__dict__.pop("kind", None)
        self.step, self.attempt, self.memory, self.latest = self.step + 1, self.attempt + 1, None, None
        self._blank()
        if watched:
            self.watch_confidence()
        self.done = not self.strategy.begin(self)

    @property
    def request(self) -> Request:
        return self.decoding.request

    @cached_property
    def request_id(self) -> str:
        return self.decoding.request.request_id

    @cached_property
    def kind(self) -> tuple:
        """What requests must have in common to be decided together."""
        s = self.decoding.settings
        choice = s.temperature, s.top_k, s.top_p, s.cfg_scale, self.strategy.judges(self)
        return self.decoding.rule, *choice, s.edit_threshold, s.remask_threshold

    @cached_property
    def plain(self) -> bool:
        """Whether it is decided as most requests are: block by block, from left to right, by its rule alone, unobserved.

        What such requests have in common is computed for all of them at once. Known from its first step on.
        """
        settings = self.decoding.settings
        watched = self.script is not None or self.recorder is not None or bool(self.keep)
        special = watched or self.revises or settings.cfg_scale > 0 or self.decoding.rule.remembers
        return type(self.strategy) is Block and not special and not self.request.holes

    @property
    def capacity(self) -> int:
        """Positions it may come to need."""
        return self.canvas.capacity

    @property
    def branches(self) -> int:
        """Rows a position: one, or two under guidance."""
        return self.pages.branches

    @property
    def begun(self) -> bool:
        """Whether it has ever taken part in a step."""
        return self.times.started is not None

    @property
    def stale(self) -> bool:
        """Whether an approximate cache must be filled anew."""
        interval, refreshed = self.engine.refresh_interval, self.pages.refreshed
        return refreshed is None or (interval is not None and self.step - refreshed >= interval)

    @property
    def lingering_from(self) -> int:
        """First position of finished blocks that are still recomputed."""
        return self.pages.lingering[0][0] if self.pages.lingering else self.capacity

    def listen(self, recorder: "Recorder | None") -> None:
        """Have decisions carry what the recorder wants."""
        if recorder is not None:
            self.recorder, self.keep = recorder, self.keep | frozenset(recorder.keep)
            self.topk = recorder.topk if "topk" in recorder.keep else 0

    def watch_confidence(self) -> None:
        """Keep how sure the model is of each token that it commits."""
        self.keep |= {"confidence"}
        self.canvas.confidence = np.full(self.capacity, np.nan)

    def confidence(self, positions: Sized[int]) -> tuple[float, ...] | None:
        """Of the tokens there, where it is kept."""
        kept = self.canvas.confidence
        return None if kept is None else tuple(kept[list(positions)].tolist())

    def started(self, now: float) -> None:
        """It takes part in a step."""
        if self.times.started is None:
            self.times = replace(self.times, started=now)

    def mark_first_block(self) -> None:
        """Some of its tokens are given out, for the first time or again."""
        if self.times.first_block is None:
            self.times = replace(self.times, first_block=time.monotonic())

    def tokens(self, branch: int) -> np.ndarray:
        """What the network is shown in that branch."""
        return self.strategy.shown(self, branch)

    def open(self, block: Positions) -> None:
        """Begin to denoise a block, beside those that are open."""
        if self.canvas.open_block(block, self.step) and self.attention_block is None:
            self.pages.refreshed = None  # new masks came into sight

    def close(self, block: OpenBlock) -> None:
        """Be done with a block."""
        self.canvas.drop(block)
        if self.engine.refresh_interval is None:
            self.pages.refreshed = None
        elif self.engine.cache_delay:
            self.pages.lingering.append((block.listed[0], self.engine.cache_delay))

    def apply(self, decision: Decision) -> None:
        """One step's decisions; closes, opens and finishes blocks."""
        settings = self.decoding.settings
        editing = settings.edit_threshold is not None
        unsettled = self.canvas.apply(decision, self.step, settings.max_post_edit_steps if editing else None)
        if self.attention_block is not None:
            self._settle(unsettled, self.attention_block)
        self.go_on()
        self.advance(decision)

    def advance(self, decision: Decision) -> None:
        """After a decision was written down: close, open and finish blocks."""
        self.done = not self.strategy.advance(self, decision)

    def close_plainly(self) -> None:
        """The one open block of a plain request has no masks left: close it, and open the next one or end."""
        assert isinstance(self.strategy, Block)
        self.canvas.open[0].closed = True
        self.done = not self.strategy.proceed(self)

    def go_on(self) -> None:
        """To the next step."""
        self.step += 1
        if self.pages.lingering:
            self.pages.lingering = [(first, left - 1) for first, left in self.pages.lingering if left > 1]

    def _settle(self, unsettled: int, block: int) -> None:
        """Final are the keys before the attention block of the first position whose token was not final."""
        last = self.canvas.last
        end = last - 1 if block == 1 and self.shift else last
        self.pages.clean = max(self.pages.clean, min(unsettled, end) // block * block)

    def outcome(self) -> Outcome:
        """The canvas as it is."""
        canvas, shown = self.canvas, self.canvas.length
        return Outcome(ids=canvas.tokens[:shown].tolist(), when=canvas.when[:shown].tolist(), nfe=self.nfe)

    def settled(self, start: int) -> Sized[int]:
        """Generated tokens from `start` on that will not change any more, as far as there is no gap in them."""
        return self.canvas.settled(start, self.canvas.first if self.revises and self.canvas.open else None)
