"""A request's tokens: which are given, masked or decided, and which blocks are open. Computes no logits."""

from collections.abc import Sequence as Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from dlm.inference.plan import Block
    from dlm.inference.request import Request

GAP = -1
"""Stands in `columns` between positions that are no neighbours."""
NOWHERE = np.zeros(0, np.int64)


@dataclass(eq=False)
class OpenBlock:
    """A block that is being denoised."""

    listed: Sized[int]
    """Its positions, as the plan gives them."""
    steps: int
    started: int
    """Step at which it was opened."""
    post_edits: int = 0
    closed: bool = False
    memory: "Tensor | None" = None
    """What a decode rule remembers of it, (l, v)."""

    def __post_init__(self) -> None:
        self.where: slice | np.ndarray
        """The same positions, to index with."""
        if isinstance(self.listed, range) and self.listed.step == 1:
            self.where = slice(self.listed.start, self.listed.stop)
        else:
            self.where = run_of(self.positions)

    @property
    def positions(self) -> np.ndarray:
        return positions_of(self.listed)


class Decision(NamedTuple):
    """What a step changes, over the columns of a canvas: (w,) each."""

    token: np.ndarray
    commit: np.ndarray
    edited: np.ndarray | None = None
    remasked: np.ndarray | None = None
    confidence: np.ndarray | None = None
    """p of the token, where a recorder or a caller wants it."""
    drafted: np.ndarray | None = None
    """The token that stood there while the step ran, guessed by a draft; -1 where none did."""
    topk: tuple[np.ndarray, np.ndarray] | None = None
    """The likeliest tokens and their logits, (w, k) each, where a recorder wants them."""


class Canvas:
    """Arrays over all positions that a request may come to need, (capacity,).

    `columns` are the positions of all open blocks in ascending order, (w,), with a GAP wherever they are no neighbours.
    Decode rules work on columns.
    """

    def __init__(self, request: "Request", capacity: int, mask_id: int) -> None:
        given = len(request.ids)
        self.mask_id = mask_id
        self.tokens = np.full(capacity, mask_id, np.int64)
        self.tokens[:given] = request.ids
        self.masked = np.ones(capacity, bool)
        self.masked[:given] = False
        for hole in request.holes:
            self.masked[hole.start : hole.stop] = True
        self.given = ~self.masked
        self.when = np.full(capacity, -1, np.int64)
        """The step that committed each position; -1 for those that are given or still masked."""
        self.remasks = np.zeros(capacity, np.int64)
        """How often each position was masked again."""
        self.confidence: np.ndarray | None = None
        """p of each token when it was committed; kept on request."""
        self.length = 0
        """Positions the network is shown."""
        self.start, self.end = given, given + request.gen_length
        """The first generated position, and one past the last (equal when infilling)."""
        self.open: list[OpenBlock] = []
        self.opened = np.zeros(4, np.int64)
        """Of one open block: `first`, `last`, its steps, and the step at which it was opened."""
        self.first = self.last = 0
        """The first position of the open blocks, and one past their last."""
        self.window: slice | np.ndarray = slice(0, 0)
        """The columns, to index with."""
        self._columns: np.ndarray | None = None

    def move(self, tokens: np.ndarray, masked: np.ndarray, when: np.ndarray, opened: np.ndarray) -> None:
        """Have other arrays for the same, of the same shapes."""
        tokens[:], masked[:], when[:], opened[:] = self.tokens, self.masked, self.when, self.opened
        self.tokens, self.masked, self.when, self.opened = tokens, masked, when, opened

    @property
    def columns(self) -> np.ndarray:
        if self._columns is None:  # made when they are asked for: where requests are decided together, nobody does
            window = self.window
            self._columns = np.arange(window.start, window.stop) if isinstance(window, slice) else window
        return self._columns

    @property
    def real(self) -> np.ndarray:
        """Which columns are no GAP."""
        return self.columns != GAP

    @property
    def capacity(self) -> int:
        return len(self.tokens)

    @property
    def active(self) -> list[int]:
        """Positions of the open blocks."""
        return self.columns[self.columns != GAP].tolist()

    @property
    def first_mask(self) -> int:
        """The first masked position; the capacity when there is none."""
        at = int(self.masked.argmax())
        return at if self.masked[at] else self.capacity

    def open_masks(self) -> np.ndarray:
        """Which columns are masked, (w,)."""
        masks = self.masked[self.window]
        return masks.copy() if isinstance(self.window, slice) else masks & self.real

    def unfinished(self) -> np.ndarray:
        """Which columns belong to a block that is not closed, (w,)."""
        if len(self.open) == 1:
            return self.real
        return np.isin(self.columns, np.concatenate([block.positions for block in self.open if not block.closed]))

    def open_block(self, block: "Block", step: int) -> bool:
        """Begin to denoise a block; whether the network is shown more positions than before."""
        self.open.append(OpenBlock(block.positions, block.steps, step))
        self._lay_out()
        grows = block.length > self.length
        self.length = max(self.length, block.length)
        return grows

    def drop(self, block: OpenBlock) -> None:
        """Take a finished block out of the open ones."""
        self.open.remove(block)
        if self.open:
            self._lay_out()

    def apply(self, decision: Decision, step: int, post_edits: int | None = None) -> int:
        """Write down a step's decisions and close the blocks that are finished.

        With `post_edits` a block without masks stays open until a step changes nothing in it, so many steps at most.
        Returns the first position whose token was not final when the step's keys were computed.
        """
        had_masks = [post_edits is not None and self._has_masks(block) for block in self.open]
        first, columns, edited = self.first_mask, self.columns, NOWHERE
        changed = decision.commit.nonzero()[0]
        written = committed = columns[changed]
        if decision.edited is not None and decision.remasked is not None:
            changed = (decision.commit | decision.edited).nonzero()[0]
            written, edited = columns[changed], columns[decision.edited]
            first = min([first, *columns[decision.edited | decision.remasked].tolist()])
        if decision.drafted is not None:  # keys of drafts that were kept are final
            waiting = columns[~(decision.commit & (decision.drafted == decision.token))]
            first = min([*waiting[self.masked[waiting]].tolist(), self.capacity])
        self.tokens[written] = decision.token[changed]
        self.when[committed] = step
        if self.confidence is not None and decision.confidence is not None:
            self.confidence[written] = decision.confidence[changed]
        self.masked[committed] = False
        if decision.remasked is not None:
            back = columns[decision.remasked]
            self.masked[back], self.remasks[back] = True, self.remasks[back] + 1
            self.tokens[back] = self.mask_id
        for block, masks in zip(self.open, had_masks, strict=True):
            block.closed = block.closed or self._is_finished(block, masks, edited, post_edits)
        return first

    def settled(self, start: int, until: int | None = None) -> Sized[int]:
        """Generated tokens from `start` on, up to the first mask or `until`."""
        end = min(self.length, self.end)
        if until is not None:
            end = min(end, until)
        if start >= end or self.masked[start]:
            return []
        count = int(self.masked[start:end].argmax())  # 0: there is no mask, for the first is none
        return self.tokens[start : start + count if count else end].tolist()

    def after(self, decision: Decision) -> np.ndarray:
        """A copy of the tokens shown to the network, as they will be when `decision` is applied."""
        tokens = self.tokens[: self.length].copy()
        if decision.drafted is not None:  # what was refused goes
            tokens[self.columns] = self.mask_id
        changed = decision.commit if decision.edited is None else decision.commit | decision.edited
        tokens[self.columns[changed]] = decision.token[changed]
        if decision.remasked is not None:
            tokens[self.columns[decision.remasked]] = self.mask_id
        return tokens

    def _is_finished(self, block: OpenBlock, had_masks: bool, edited: np.ndarray, post_edits: int | None) -> bool:
        if self._has_masks(block):
            return False
        if post_edits is not None:
            block.post_edits += not had_masks
            touched = had_masks or bool(np.isin(block.positions, edited).any())
            return not touched or block.post_edits >= post_edits
        return True

    def _has_masks(self, block: OpenBlock) -> bool:
        return bool(np.count_nonzero(self.masked[block.where]))

    def _lay_out(self) -> None:
        block = self.open[0]
        window = block.where
        if len(self.open) > 1:
            window = run_of(np.sort(np.concatenate([block.positions for block in self.open])))
        if isinstance(window, slice):
            self.first, self.last = window.start, window.stop
        else:
            self.first, self.last = int(window[0]), int(window[-1]) + 1
            window = np.insert(window, np.flatnonzero(np.diff(window) != 1) + 1, GAP)
        self.window, self._columns = window, None
        self.opened[:] = self.first, self.last, block.steps, block.started


def positions_of(positions: Sized[int]) -> np.ndarray:
    """As an array."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, positions.step)
    return np.asarray(positions, np.int64)


def run_of(positions: np.ndarray) -> slice | np.ndarray:
    """Positions in ascending order to index with: a slice, which is a view, where they are neighbours."""
    first, after = int(positions[0]), int(positions[-1]) + 1
    return slice(first, after) if after - first == len(positions) else positions
