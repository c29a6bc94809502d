"""Which requests take part in the next forward, and which pages they own."""

from collections import deque
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from dlm.errors import UserError
from dlm.inference.config import EngineConfig
from dlm.inference.pages import PagePool, digest
from dlm.inference.parking import park, resume
from dlm.inference.sequence import Sequence
from dlm.inference.spans import CACHES, Span, full


class Scheduled(NamedTuple):
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
        self.span_of = CACHES[cache]
        self.approximate = cache in ("prefix", "dual")
        self.lasting = config.refresh_interval is None
        """Whether a request runs the same until its blocks or its pages change, however many steps it takes."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()  # parked ones and new ones, in order of arrival
        self.preemptions = 0

    def require_fit(self, seq: Sequence) -> None:
        """Raises UserError for a request that could never run."""
        need = self.pool.pages_for(seq.capacity) * seq.branches
        name = f"request {seq.request.request_id!r}"
        if need > self.pool.num_pages:
            raise UserError(
                f"{name} needs {need} pages of {self.pool.page_size} positions ({seq.capacity} positions"
                f"{f', {seq.branches} times' if seq.branches > 1 else ''}), and the engine has {self.pool.num_pages}: "
                "raise num_pages or memory_fraction, or shorten the request"
            )
        most = self._widest(seq)
        if most > self.config.max_num_tokens:
            raise UserError(
                f"{name} needs {most} positions in one forward, and max_num_tokens = {self.config.max_num_tokens}: "
                "raise it, or shorten the request"
            )

    def add(self, seq: Sequence) -> None:
        """Queue a request that fits."""
        self.waiting.append(seq)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self.running or seq in self.waiting

    def clear(self) -> None:
        """Forget all requests, where the pool is cleared too."""
        self.running.clear()
        self.waiting.clear()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def remove(self, seq: Sequence) -> None:
        """Forget a request, whatever its state; its pages are free at once."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        seq.pages.release(self.pool)

    def schedule(self) -> list[Scheduled]:
        """The next forward. Not empty while there is work."""
        scheduled: list[Scheduled] = []
        budget = self.config.max_num_tokens
        order = sorted(self.running, key=attrgetter("number"))
        order.sort(key=attrgetter("waited"), reverse=True)
        for seq in order:
            if seq.parked is not None:
                continue  # for one that stands before it
            seq.waited += 1
            item = self._next(seq, budget, scheduled)
            if item is not None:
                budget -= len(item.span.positions) * seq.pages.branches
                scheduled.append(item)
        while self.waiting and len(self.running) < self.config.max_num_requests:
            span = self._admit(self.waiting[0], budget)
            if span is None:
                break
            seq = self.waiting.popleft()
            self.running.append(seq)
            budget -= len(span.positions) * seq.branches
            scheduled.append(Scheduled(seq, span))
        for item in scheduled:
            item.sequence.waited = 0
        assert scheduled or not self.has_work, "the scheduler has work, and nothing fits"
        return scheduled

    def ran(self, item: Scheduled) -> None:
        """Book a forward: what is cached now."""
        seq, span = item.sequence, item.span
        seq.nfe += 1 if seq.plain else seq.strategy.forwards(seq)
        if self.approximate and len(span.positions) == seq.canvas.length and span == full(seq):
            seq.pages.refreshed = seq.step
        if not span.decides:
            seq.pages.clean, seq.pages.booked = max(seq.pages.clean, span.end), -1

    def remember(self, seq: Sequence) -> None:
        """Let the pages whose keys are final be found by others with the same beginning."""
        if seq.pages.booked == seq.pages.clean:
            return
        seq.pages.booked = seq.pages.clean
        if self.cache != "exact":
            return
        for branch, table in enumerate(seq.pages.tables):
            tokens = seq.tokens(branch)
            while (at := len(seq.pages.digests[branch])) < len(table) and self._closure(seq, at) <= seq.pages.clean:
                seq.pages.digests[branch].append(self._digest(seq, branch, at, tokens))
                self.pool.register(table[at], seq.pages.digests[branch][at])

    def _next(self, seq: Sequence, budget: int, scheduled: list[Scheduled]) -> Scheduled | None:
        """What a running request runs next: the very item of the step before where nothing it depends on has changed."""
        lasting = self.lasting and seq.plain
        state = _state(seq) if lasting else ()
        if lasting and seq.latest is not None:
            known, item = seq.latest
            if known == state and len(item.span.positions) <= budget:
                return item
        span = self._fit(seq, budget)
        if span is None or not self._provide(seq, max(span.visible, seq.strategy.reach(seq)), scheduled):
            return None
        item = Scheduled(seq, span)
        if lasting and span.decides:
            seq.latest = (*state[:-1], seq.pages.version), item  # it may have got more pages
        return item

    def _fit(self, seq: Sequence, budget: int) -> Span | None:
        """What the request runs next, cut to the budget where it is a prompt that can be cut; None if it must wait."""
        span = self.span_of(seq)
        room = budget // seq.branches
        if len(span.positions) <= room:
            return span
        if self.cache != "exact":
            return None
        block = seq.attention_block or 1
        start, known = span.positions[0], min(seq.canvas.first, seq.canvas.first_mask)
        end = min((start + room) // block * block, known // block * block)
        if end <= max(start, seq.pages.clean):
            return None
        return span._replace(positions=range(start, end), visible=end, decides=False)

    def _widest(self, seq: Sequence) -> int:
        """The most positions that one forward of the request cannot do without."""
        if self.cache == "exact" and seq.strategy.left_to_right:
            block = seq.attention_block or 1
            blocks = seq.strategy.most_open(seq) + 1  # the one before is written in the same forward
            needed = blocks * max(block, len(seq.canvas.columns)) + block + seq.shift
            return min(seq.capacity, needed) * seq.branches
        return seq.capacity * seq.branches

    def _provide(self, seq: Sequence, positions: int, scheduled: list[Scheduled]) -> bool:
        """Pages for so many positions; parks later arrivals, or the request itself, when there are not enough."""
        while not seq.pages.grow(self.pool, self.pool.pages_for(positions)):
            busy = {item.sequence.number for item in scheduled}
            others = [other for other in self.running if other.number > seq.number and other.number not in busy]
            victim = max(others, key=lambda other: other.number, default=seq)
            self._park(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, seq: Sequence, budget: int) -> Span | None:
        """Begin or take up a request if it fits now."""
        pages, held = seq.pages, 0
        if seq.parked is not None:
            held = seq.parked.pages
            if held * seq.branches > self.pool.free:
                return None
        else:
            pages.begin(self.pool)
            self._reuse(seq)
        span = self._fit(seq, budget)
        reach = 0 if span is None else max(span.visible, seq.strategy.reach(seq))
        needed = max(held, self.pool.pages_for(reach)) * seq.branches - pages.held if span is not None else 0
        if span is None or needed > self.pool.free:
            pages.release(self.pool)
            if seq.parked is None:
                pages.clean = 0
            return None
        if seq.parked is not None:
            resume(seq, self.pool)
        grown = pages.grow(self.pool, self.pool.pages_for(reach))
        assert grown
        return span

    def _park(self, seq: Sequence) -> None:
        """Take a running request's pages, and queue it in its old place."""
        self.preemptions += 1
        self.running.remove(seq)
        park(seq, self.pool)
        self._queue(seq)

    def give_back(self, seq: Sequence) -> None:
        """Take a running request's pages, and queue it in its old place as if it had not begun."""
        self.running.remove(seq)
        seq.pages.release(self.pool)
        self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        place = next((i for i, other in enumerate(self.waiting) if other.number > seq.number), len(self.waiting))
        self.waiting.insert(place, seq)

    def _reuse(self, seq: Sequence) -> None:
        """Take the pages of others that begin with the same tokens."""
        if self.cache != "exact":
            return
        given, pages = seq.canvas.given, seq.pages
        known = int(np.argmin(given)) if not given.all() else seq.capacity
        for branch, table in enumerate(pages.tables):
            tokens = seq.tokens(branch)
            while self._closure(seq, at := len(table)) <= known:
                name = self._digest(seq, branch, at, tokens)
                page = self.pool.find(name)
                if page is None:
                    break
                pages.share(self.pool, page, name, branch)
        shared = min(map(len, pages.tables))
        pages.cut(self.pool, shared)
        pages.clean = pages.reused = shared * self.pool.page_size

    def _closure(self, seq: Sequence, page: int) -> int:
        """Positions whose tokens decide what the request's page of that number holds: its own and its last block's."""
        block = seq.attention_block or 1
        return -(-(page + 1) * self.pool.page_size // block) * block

    def _digest(self, seq: Sequence, branch: int, page: int, tokens: np.ndarray) -> bytes:
        before = seq.pages.digests[branch][page - 1] if page else f"{seq.attention_block}{seq.strategy.marks}".encode()
        start = self._closure(seq, page - 1) if page else 0
        return digest(tokens[start : self._closure(seq, page)].tolist(), before)


def _state(seq: Sequence) -> tuple:
    """All that a plain request's span depends on, where nothing is due after so many steps."""
    canvas, pages = seq.canvas, seq.pages
    return canvas.first, canvas.last, canvas.length, pages.clean, pages.refreshed, pages.version
