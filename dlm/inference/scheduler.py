"""Which requests take part in the next forward, and which pages they own. Knows no tensors but what pages hold."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from dlm.errors import UserError
from dlm.inference.config import EngineConfig
from dlm.inference.pages import PagePool, digest
from dlm.inference.sequence import Sequence
from dlm.inference.spans import CACHES, Span, full


@dataclass(frozen=True)
class Turn:
    """A request and what the next forward runs of it."""

    sequence: Sequence
    span: Span


class Scheduler:
    """Continuous batching under a budget of positions a forward and of pages.

    Those that waited longest go first, among equals the earlier arrival, so that nobody starves. When pages run out
    the latest arrival is parked: its pages go to the host's memory and come back, bit for bit, as soon as there is
    room; the earliest arrival is never parked, so something always moves. New requests are admitted in order of
    arrival, after all that are parked.
    """

    def __init__(self, pool: PagePool, config: EngineConfig, cache: str) -> None:
        self.pool, self.config, self.cache = pool, config, cache
        self.look = CACHES[cache]
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()  # parked ones and new ones, in order of arrival
        self.preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a request; raises UserError when it could never run."""
        need = self.pool.pages_for(seq.capacity) * seq.lanes
        name = f"request {seq.request.request_id!r}"
        if need > self.pool.num_pages:
            raise UserError(
                f"{name} needs {need} pages of {self.pool.page_size} positions ({seq.capacity} positions"
                f"{', twice for guidance' if seq.lanes > 1 else ''}), and the engine has {self.pool.num_pages}: "
                "raise num_pages or memory_fraction, or shorten the request"
            )
        most = self._widest(seq)
        if most > self.config.max_num_tokens:
            raise UserError(
                f"{name} needs {most} positions in one forward, and max_num_tokens = {self.config.max_num_tokens}: "
                "raise it, or shorten the request"
            )
        self.waiting.append(seq)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def remove(self, seq: Sequence) -> None:
        """Forget a request, whatever its state; its pages are free at once."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._release(seq)

    def schedule(self) -> list[Turn]:
        """The next forward. Not empty while there is work."""
        turns: list[Turn] = []
        budget = self.config.max_num_tokens
        for seq in sorted(self.running, key=lambda seq: (-seq.waited, seq.number)):
            if seq not in self.running:
                continue  # parked for one that stands before it
            seq.waited += 1
            span = self._fit(seq, budget)
            if span is None:
                continue
            if not self._provide(seq, span.visible, {turn.sequence.number for turn in turns}):
                continue
            budget -= len(span.positions) * seq.lanes
            turns.append(Turn(seq, span))
        while self.waiting and len(self.running) < self.config.max_num_requests:
            span = self._admit(self.waiting[0], budget)
            if span is None:
                break
            seq = self.waiting.popleft()
            self.running.append(seq)
            budget -= len(span.positions) * seq.lanes
            turns.append(Turn(seq, span))
        for turn in turns:
            turn.sequence.waited = 0
        assert turns or not self.has_work, "the scheduler has work, and nothing fits"
        return turns

    def ran(self, turn: Turn) -> None:
        """Book a forward: what is cached now."""
        seq, span = turn.sequence, turn.span
        seq.nfe += seq.lanes
        if self.look is not full and len(span.positions) == seq.length and span == full(seq):
            seq.refreshed = seq.step
        if not span.decides:
            seq.clean = max(seq.clean, span.end)

    def remember(self, seq: Sequence) -> None:
        """Let the pages whose keys are final be found by others with the same beginning."""
        if self.cache != "exact":
            return
        for lane, table in enumerate(seq.tables):
            tokens = seq.tokens(lane)
            while (at := len(seq.digests[lane])) < len(table) and self._closure(seq, at) <= seq.clean:
                seq.digests[lane].append(self._digest(seq, lane, at, tokens))
                self.pool.register(table[at], seq.digests[lane][at])

    def _fit(self, seq: Sequence, budget: int) -> Span | None:
        """What the request runs next, cut to the budget where it is a prompt that can be cut; None if it must wait."""
        span = self.look(seq)
        room = budget // seq.lanes
        if len(span.positions) <= room:
            return span
        if self.look is not CACHES["exact"]:
            return None
        sight = seq.sight or 1
        start = span.positions[0]
        end = min((start + room) // sight * sight, seq.first // sight * sight)
        if end <= max(start, seq.clean):
            return None
        return replace(span, positions=range(start, end), visible=end, decides=False)

    def _widest(self, seq: Sequence) -> int:
        """The most positions that one forward of the request cannot do without."""
        if self.cache == "exact" and not seq.request.holes:
            sight = seq.sight or 1
            blocks = seq.max_active + 1  # the one before is written in the same forward
            return min(seq.capacity, blocks * max(sight, len(seq.columns)) + sight + seq.shift) * seq.lanes
        return seq.capacity * seq.lanes

    def _provide(self, seq: Sequence, positions: int, busy: set[int]) -> bool:
        """Pages for so many positions; parks later arrivals, or the request itself, when there are not enough."""
        while not self._grow(seq, positions):
            others = [other for other in self.running if other.number > seq.number and other.number not in busy]
            victim = max(others, key=lambda other: other.number, default=seq)
            self._park(victim)
            if victim is seq:
                return False
        return True

    def _grow(self, seq: Sequence, positions: int) -> bool:
        want = self.pool.pages_for(positions)
        missing = sum(max(0, want - len(table)) for table in seq.tables)
        if missing > self.pool.free:
            return False
        for table in seq.tables:
            pages = self.pool.allocate(max(0, want - len(table)), table[-1] if table else None)
            assert pages is not None
            table += pages
            seq.version += bool(pages)
        return True

    def _admit(self, seq: Sequence, budget: int) -> Span | None:
        """Begin or take up a request if it fits now."""
        held = None
        if seq.parked is not None:
            held = seq.parked[0].shape[2]
            if held * seq.lanes > self.pool.free:
                return None
        else:
            seq.tables = [[] for _ in range(seq.lanes)]
            seq.digests = [[] for _ in range(seq.lanes)]
            self._reuse(seq)
        span = self._fit(seq, budget)
        want = self.pool.pages_for(span.visible) if span is not None else 0
        shared = sum(map(len, seq.tables))
        if span is None or max(want, held or 0) * seq.lanes - shared > self.pool.free:
            self._release(seq)
            return None
        if seq.parked is not None:
            self._unpark(seq)
        grown = self._grow(seq, span.visible)
        assert grown
        return span

    def _park(self, seq: Sequence) -> None:
        """Take a running request's pages; what they hold waits in the host's memory."""
        self.preemptions += 1
        self.running.remove(seq)
        seq.parked = [self.pool.read(table) for table in seq.tables]
        for table in seq.tables:
            self.pool.release(table)
        seq.tables = []
        place = next((i for i, other in enumerate(self.waiting) if other.number > seq.number), len(self.waiting))
        self.waiting.insert(place, seq)

    def _unpark(self, seq: Sequence) -> None:
        assert seq.parked is not None
        for content in seq.parked:
            pages = self.pool.allocate(content.shape[2])
            assert pages is not None
            self.pool.write(pages, content)
            seq.tables.append(pages)
        seq.parked = None
        seq.version += 1
        seq.digests = [[] for _ in range(seq.lanes)]  # its pages are other ones now

    def _release(self, seq: Sequence) -> None:
        for table in seq.tables:
            self.pool.release(table)
        seq.tables, seq.digests = [], []
        if seq.parked is None:
            seq.clean = 0

    def _reuse(self, seq: Sequence) -> None:
        """Take the pages of others that begin with the same tokens."""
        if self.cache != "exact":
            return
        known = int(np.argmin(seq.given)) if not seq.given.all() else seq.capacity
        for lane, table in enumerate(seq.tables):
            tokens = seq.tokens(lane)
            while self._closure(seq, at := len(table)) <= known:
                name = self._digest(seq, lane, at, tokens)
                page = self.pool.find(name)
                if page is None:
                    break
                self.pool.share(page)
                table.append(page)
                seq.digests[lane].append(name)
        shared = min(map(len, seq.tables))
        for table, digests in zip(seq.tables, seq.digests, strict=True):
            self.pool.release(table[shared:])
            del table[shared:], digests[shared:]
        seq.clean = shared * self.pool.page_size

    def _closure(self, seq: Sequence, page: int) -> int:
        """Positions whose tokens decide what the sequence's page of that number holds: its own and its last block's."""
        sight = seq.sight or 1
        return -(-(page + 1) * self.pool.page_size // sight) * sight

    def _digest(self, seq: Sequence, lane: int, page: int, tokens: np.ndarray) -> bytes:
        before = seq.digests[lane][page - 1] if page else f"{seq.sight}".encode()
        start = self._closure(seq, page - 1) if page else 0
        return digest(tokens[start : self._closure(seq, page)].tolist(), before)
