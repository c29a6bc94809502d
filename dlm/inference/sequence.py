"""A request under way: its canvas, its open blocks, its pages. Knows what a step decided, not how it was computed."""

from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Float
from torch import Tensor

from dlm.inference.config import EngineConfig
from dlm.inference.decoding import Decoding
from dlm.inference.plan import Block
from dlm.inference.request import Outcome, Request
from dlm.models.config import ModelConfig

GAP = -1


@dataclass(eq=False)
class OpenBlock:
    """A block that is being denoised."""

    positions: np.ndarray
    steps: int
    started: int
    """Step at which it was opened."""
    post_edits: int = 0
    closed: bool = False
    memory: Float[Tensor, "l v"] | None = None
    """What the rule remembers of it."""


@dataclass(frozen=True)
class Decision:
    """What a step changed, over the columns of a sequence: (w,) each."""

    token: np.ndarray
    commit: np.ndarray
    edited: np.ndarray | None = None
    remasked: np.ndarray | None = None
    confidence: np.ndarray | None = None
    """p of the token, where it is wanted."""
    topk: tuple[np.ndarray, np.ndarray] | None = None
    """The likeliest tokens and their logits, (w, k) each, where they are wanted."""


class Script(Protocol):
    """Who has the last word on decisions."""

    def decision(self, seq: "Sequence", proposed: Decision) -> Decision:
        """What the sequence does in the step it has come to, where the network's rule proposes this."""
        ...

    def leads(self, step: int) -> bool:
        """Whether that step is decided here: no stop string ends the request before."""
        ...


@dataclass(eq=False)
class Sequence:
    """The host's side of a request. Arrays are over the canvas, (capacity,).

    A run of blocks is open: one, or with strategy multi_block up to `max_active_blocks` consecutive ones. `columns`
    are the run's positions in order with a gap wherever they are no neighbours: what decode rules work on.
    """

    decoding: Decoding
    config: ModelConfig
    engine: EngineConfig
    number: int
    """In order of arrival."""
    step: int = 0
    nfe: int = 0
    length: int = 0
    """Positions the network is shown."""
    clean: int = 0
    """Exact caches: positions under this one have their final keys in the pages."""
    refreshed: int | None = None
    """Other caches: the step at which all keys were computed last; None when that is due."""
    tables: list[list[int]] = field(default_factory=list)
    """The pages of each lane: the request itself and, under guidance, its twin without a prompt."""
    version: int = 0
    """Counts the changes of `tables`."""
    digests: list[list[bytes]] = field(default_factory=list)
    """Of the tables' first pages: what they hold, and all before it."""
    parked: list[Tensor] | None = None
    """What its pages held when it had to give them up."""
    script: "Script | None" = None
    """What changes its decisions before they are applied."""
    keep: frozenset[str] = frozenset()
    """What decisions carry beside tokens: "confidence", "topk"."""
    topk: int = 0
    """How many of the likeliest tokens, where they carry them."""
    waited: int = 0
    """Steps of the engine since it last took part."""

    def __post_init__(self) -> None:
        request, plan = self.request, self.decoding.plan
        self.blocks = plan.blocks(request)
        size = plan.length(request)
        # Causal families have no mask: what stands at the position being predicted is then of no consequence.
        self.mask_id = self.config.mask_token_id or 0
        self.canvas = np.full(size, self.mask_id, np.int64)
        self.canvas[: len(request.ids)] = request.ids
        self.masked = np.ones(size, bool)
        self.masked[: len(request.ids)] = False
        for hole in request.holes:
            self.masked[hole.start : hole.stop] = True
        self.given = ~self.masked
        self.when = np.full(size, -1, np.int64)
        self.remasks = np.zeros(size, np.int64)
        self.run: list[OpenBlock] = []
        self.lingering: list[tuple[int, int]] = []  # first position of a finished block, steps it is still recomputed
        self.shift = int(self.config.shifted_logits)
        self.sight = {"bidirectional": None, "causal": 1}.get(self.config.attention, self.config.block_length)
        if plan.aligned and not request.holes:
            self.sight = plan.length_of_block(None)
        settings = self.decoding.settings
        self.lanes = 2 if settings.cfg_scale > 0 else 1
        self.revises = settings.edit_threshold is not None or settings.remask_threshold is not None
        self.max_active = settings.max_active_blocks if settings.strategy == "multi_block" else 1
        self.done = not self._extend()

    @property
    def request(self) -> Request:
        return self.decoding.request

    @property
    def capacity(self) -> int:
        """Positions it may come to need."""
        return len(self.canvas)

    @property
    def active(self) -> list[int]:
        """The run's positions."""
        return self.columns[self.columns != GAP].tolist()

    @property
    def first(self) -> int:
        return int(self.columns[0])

    @property
    def last(self) -> int:
        """One past the run's last position."""
        return int(self.columns[-1]) + 1

    @property
    def lingering_from(self) -> int:
        """First position of finished blocks that are still recomputed."""
        return self.lingering[0][0] if self.lingering else self.capacity

    @property
    def stale(self) -> bool:
        """Whether an approximate cache must be filled anew."""
        interval = self.engine.refresh_interval
        return self.refreshed is None or (interval is not None and self.step - self.refreshed >= interval)

    @property
    def front(self) -> OpenBlock:
        return self.run[0]

    def tokens(self, lane: int) -> np.ndarray:
        """What the network is shown in that lane."""
        return np.where(self.given, self.mask_id, self.canvas) if lane else self.canvas

    def asked(self) -> np.ndarray:
        """Which columns the network is asked about: masks, or everything open if there may be second thoughts."""
        real = self.columns != GAP
        here = (
            np.isin(self.columns, np.concatenate([b.positions for b in self.run if not b.closed]))
            if self.wide
            else real
        )
        return here & (self.masked[self.columns] | self.revises)

    def masks(self) -> np.ndarray:
        """Which columns are masked."""
        return self.masked[self.columns] & (self.columns != GAP)

    def apply(self, decision: Decision) -> None:
        """One step's decisions; closes, opens and finishes blocks."""
        had_masks = [bool(self.masked[block.positions].any()) for block in self.run]
        dirty = self.masks()
        changed, commit = decision.commit, decision.commit
        edited = np.zeros(0, np.int64)
        if decision.edited is not None and decision.remasked is not None:
            changed = changed | decision.edited
            dirty = dirty | decision.edited | decision.remasked
            edited = self.columns[decision.edited]
        self.canvas[self.columns[changed]] = decision.token[changed]
        self.masked[self.columns[commit]] = False
        self.when[self.columns[commit]] = self.step
        if decision.remasked is not None:
            back = self.columns[decision.remasked]
            self.masked[back], self.remasks[back] = True, self.remasks[back] + 1
            self.canvas[back] = self.mask_id
        self._settle(self.columns[dirty])
        self.step += 1
        self.lingering = [(first, left - 1) for first, left in self.lingering if left > 1]
        for block, masks in zip(self.run, had_masks, strict=True):
            touched = bool(len(edited) and np.isin(block.positions, edited).any())
            block.closed = block.closed or self._closes(block, masks, touched)
        self.done = not self._advance()

    def _settle(self, dirty: np.ndarray) -> None:
        """Final are the keys before the attention block of the first position that was, or now is, not final."""
        if self.sight is not None:
            end = self.last - 1 if self.sight == 1 and self.shift else self.last
            first = int(dirty.min()) if len(dirty) else end
            self.clean = max(self.clean, min(first, end) // self.sight * self.sight)

    def _closes(self, block: OpenBlock, had_masks: bool, has_edits: bool) -> bool:
        """Whether the block is finished: no mask left, and no second thoughts pending."""
        if self.masked[block.positions].any():
            return False
        settings = self.decoding.settings
        if settings.edit_threshold is not None:
            block.post_edits += not had_masks
            if (had_masks or has_edits) and block.post_edits < settings.max_post_edit_steps:
                return False
        return True

    def _advance(self) -> bool:
        """Drop finished blocks from the front, open new ones; False at the end of the request."""
        moved = False
        while self.run and self.front.closed:
            block = self.run.pop(0)
            moved = True
            if self._stops(block):
                return False
            if self.engine.refresh_interval is not None and self.engine.cache_delay:
                self.lingering.append((int(block.positions[0]), self.engine.cache_delay))
        if moved and self.engine.refresh_interval is None:
            self.refreshed = None
        return self._extend(moved)

    def _stops(self, block: OpenBlock) -> bool:
        return not self.request.holes and not self.decoding.stop.isdisjoint(self.canvas[block.positions].tolist())

    def _extend(self, changed: bool = True) -> bool:
        """Open blocks while the run has room and its last one is filled far enough; False when nothing is open."""
        while len(self.run) < self.max_active:
            if self.run:
                filled = 1 - self.masked[self.run[-1].positions].mean()
                if filled < self.decoding.settings.block_add or any(self._stops(block) for block in self.run):
                    break
            block = next(self.blocks, None)
            if block is None:
                break
            self._open(block)
            changed = True
        if changed and self.run:
            self._lay_out()
        return bool(self.run)

    def _open(self, block: Block) -> None:
        self.run.append(OpenBlock(np.asarray(block.positions, np.int64), block.steps, self.step))
        if block.length > self.length:
            self.length = block.length
            if self.sight is None:
                self.refreshed = None  # new masks came into sight

    def _lay_out(self) -> None:
        """The run's columns."""
        positions = np.concatenate([block.positions for block in self.run])
        gaps = np.flatnonzero(np.diff(positions) != 1) + 1
        self.columns = np.insert(positions, gaps, GAP)
        self.wide = len(self.run) > 1

    def outcome(self) -> Outcome:
        """The canvas as it is."""
        return Outcome(ids=self.canvas[: self.length].tolist(), when=self.when[: self.length].tolist(), nfe=self.nfe)

    def settled(self, start: int) -> Sized[int]:
        """Generated tokens from `start` on that will not change any more, as far as there is no gap in them."""
        end = min(self.length, len(self.request.ids) + self.request.gen_length)
        if self.revises and self.run:
            end = min(end, self.first)
        masks = np.flatnonzero(self.masked[start:end])
        return self.canvas[start : start + masks[0] if len(masks) else end].tolist()
