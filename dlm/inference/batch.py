"""The requests of an engine and what a step does with them. Only the thread that steps touches this, or one between steps."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Sized
from dataclasses import replace
from typing import Any

import torch

from dlm.diffusion.choose import BrokenLogits
from dlm.inference.attempts import fill_again, judged, wanting
from dlm.inference.canvas import Decision
from dlm.inference.config import EngineConfig
from dlm.inference.decoding import Decoding
from dlm.inference.drafting.drafter import Drafter
from dlm.inference.drafting.making import SELF, drafter_of
from dlm.inference.events import Event, Log, Stats, masked_event, step_events
from dlm.inference.pages import PagePool
from dlm.inference.recording import finish, note, note_masked
from dlm.inference.request import StepEvent
from dlm.inference.scheduler import Scheduler
from dlm.inference.sequence import Sequence
from dlm.inference.step import Stepper
from dlm.inference.strategies import STRATEGIES, Strategy
from dlm.inference.strategies.speculative import Speculative
from dlm.inference.texts import result_of
from dlm.models.lm import LM

REMEMBERED = 1024
"""Ended requests whose events are kept for those who ask late."""


class Batch:
    """Requests by id, from their submission to their end, and the events they gave."""

    def __init__(self, lm: LM, pool: PagePool, config: EngineConfig, cache: str, draft: Any = None) -> None:
        """`draft` is what `drafting.making.named` gave."""
        self.lm, self.pool, self.draft = lm, pool, draft
        self.scheduler = Scheduler(pool, config, cache)
        self.stepper = Stepper(lm, pool, config)
        self.strategies: dict[str, Strategy] = {}
        self.drafter: Drafter | None = None
        if draft is not None and draft != SELF:
            self.drafter = drafter_of(draft, lm, pool, self.stepper.compute)
            self.strategies["speculative"] = Speculative(lm, pool, self.drafter)
        self.on_step: Callable[[StepEvent], None] | None = None
        self.sequences: dict[str, Sequence] = {}
        self.timed: set[Sequence] = set()
        """Those with a deadline."""
        self.ended: OrderedDict[str, Log] = OrderedDict()
        self.news: deque[Event] = deque()
        self.arrivals = self.finished = self.tokens = 0

    def strategy_of(self, decoding: Decoding) -> Strategy:
        """The one object of the request's strategy. Holes have their own, unless another one than the usual is named."""
        name = decoding.settings.strategy
        if decoding.request.holes and name in ("block", "multi_block"):
            name = "infilling"
        if decoding.drafted:
            name = "jumps" if self.draft == SELF else "speculative"
        if name not in self.strategies:
            self.strategies[name] = STRATEGIES[name](self.lm, self.pool)
        return self.strategies[name]

    def admit(self, seq: Sequence) -> None:
        """Queue a request that was registered."""
        if self._is_current(seq) and seq not in self.scheduler:
            if seq.deadline is not None:
                self.timed.add(seq)
            if seq.done:
                self._finish(seq)
            else:
                self.scheduler.add(seq)

    def forget(self, seq: Sequence) -> None:
        """A request has ended: its pages are free, its trace is given up unless it was finished."""
        self.scheduler.remove(seq)
        self.timed.discard(seq)
        self.stepper.canvases.remove(seq)
        seq.strategy.forget(seq)
        recorder, seq.recorder = seq.recorder, None
        if recorder is not None:
            recorder.drop()
        if self._is_current(seq):
            del self.sequences[seq.request_id]
        if not self.sequences:
            self.stepper.crowds.forget()
        if seq.log.private:
            if seq.final is None:  # cancelled by another thread: who waits for it must hear of it
                seq.log.events.append(Event(request_id=seq.request_id, error="it was cancelled"))
        else:
            seq.log.closed = True
            if seq.log.kept:
                self.ended[seq.request_id] = seq.log
            while len(self.ended) > REMEMBERED:
                self.ended.popitem(last=False)

    def step(self) -> None:
        """One forward for all requests whose turn it is, and what follows from it."""
        now = time.monotonic()
        for seq in [seq for seq in self.timed if seq.deadline is not None and seq.deadline < now]:
            given = round((seq.deadline or 0) - seq.times.queued, 9)  # seconds, without what adding up the clock cost
            self.fail(seq, f"it was not finished within its deadline, {given:g} s")
        if not self.scheduler.has_work:
            return
        with torch.inference_mode():
            scheduled = self.scheduler.schedule()
            for item in scheduled:
                if item.sequence.times.started is None:
                    self._start(item.sequence, now)
            self.stepper.apart = self.on_step is not None
            results, together = self.stepper.run(scheduled)
        for item in scheduled:
            self.scheduler.ran(item)
        for seq, answer in results:
            if isinstance(answer, BrokenLogits):
                self.fail(seq, str(answer))
        for commits in together:
            settled, news = self.stepper.canvases.write(commits)
            for seq in settled:
                if self._is_current(seq):
                    self.scheduler.remember(seq)
            for seq, end in news:
                if self._is_current(seq):
                    self._go_on(seq, end)
        made = [(seq, answer) for seq, answer in results if not isinstance(answer, BrokenLogits)]
        for number in range(max((len(decisions) for _, decisions in made), default=0)):
            decided = [(seq, decisions[number]) for seq, decisions in made if number < len(decisions) and not seq.done]
            if self.on_step is not None:
                for event in step_events(sorted(decided, key=lambda entry: entry[0].number)):
                    self.on_step(event)
            for seq, decision in decided:
                self._apply(seq, decision)

    def fail(self, seq: Sequence, error: str) -> None:
        """End a request with an error event."""
        self._end(seq, Event(request_id=seq.request_id, error=error, times=replace(seq.times, done=time.monotonic())))

    def mend(self, error: BaseException | None) -> None:
        """After something was broken off midway: those that had begun end with an error event, all others are queued.

        Can itself be broken off and done again: nothing is taken from where it stands before it is done.
        """
        name = type(error).__name__
        reason = "it was interrupted" if error is None or isinstance(error, KeyboardInterrupt) else f"{name}: {error}"
        self.stepper.forget()
        self.stepper.canvases.clear()
        for seq in list(self.sequences.values()):
            seq.pages.drop()  # the pool is cleared below
            seq.parked = None
            if seq.final is not None:
                self._end(seq, seq.final)
            elif seq.begun:
                self.fail(seq, f"it ended with the step it was in: {reason}")
        self.pool.clear()
        self.scheduler.clear()
        for seq in sorted(self.sequences.values(), key=lambda seq: seq.number):
            self.admit(seq)

    def close(self) -> None:
        """End all requests, and give the pages' memory back."""
        for seq in list(self.sequences.values()):
            self.fail(seq, "the engine was closed")
        self.stepper.forget()
        self.pool.close()
        if self.drafter is not None:
            self.drafter.close()

    def reload(self) -> None:
        """The weights have changed."""
        self.stepper.reload()
        self.pool.clear()
        if self.drafter is not None:
            self.drafter.reload()

    def stats(self) -> Stats:
        pages = self.pool.count()
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            finished=self.finished,
            nfe=self.stepper.nfe,
            tokens=self.tokens,
            rows=self.stepper.rows,
            pages_used=pages.used,
            pages_free=pages.free,
            pages_cached=pages.cached,
            preemptions=self.scheduler.preemptions,
        )

    def _start(self, seq: Sequence, now: float) -> None:
        """It takes part in a step for the first time."""
        if seq.plain:
            self.stepper.canvases.add(seq)
        seq.started(now)

    def _apply(self, seq: Sequence, decision: Decision) -> None:
        if not self._is_current(seq):
            return  # it was cancelled in this step
        if seq.recorder is not None:
            note(seq.recorder, seq, decision)
        seq.apply(decision)
        self._go_on(seq)

    def _go_on(self, seq: Sequence, settled: int | None = None) -> None:
        """After a step of the request: what others can use of it, and what is new. All before `settled` is settled."""
        self.scheduler.remember(seq)
        if seq.done:
            if wanting(self.lm, seq):
                self._fill_again(seq)
            else:
                self._finish(seq)
        elif seq.strategy.left_to_right:
            self._tell_settled(seq, settled)

    def _fill_again(self, seq: Sequence) -> None:
        """Its holes are masked again, which is a step without a forward, and filled anew."""
        if seq.recorder is not None:
            note_masked(seq.recorder, seq)
        self.scheduler.give_back(seq)
        fill_again(seq)
        if self.on_step is not None:
            self.on_step(masked_event(seq))

    def _tell_settled(self, seq: Sequence, end: int | None) -> None:
        """What is new of a request that goes on; ends it where that completes a stop string."""
        stream, stop, canvas = seq.text, seq.decoding.stop, seq.canvas
        first = canvas.start + len(stream.tokens)
        settled = seq.settled(first) if end is None else canvas.tokens[first : min(end, canvas.end)].tolist()
        if not settled or (stream.tokens and stream.tokens[-1] in stop):
            return
        tokens = _until_stop(settled, stop)
        if stream.completes(tokens) and not (seq.script is not None and seq.script.leads(seq.step)):
            self._finish(seq)
            return
        seq.mark_first_block()
        event = Event(
            request_id=seq.request_id,
            text=stream.add(tokens),
            tokens=tuple(tokens),
            confidence=seq.confidence(range(first, first + len(tokens))),
            times=seq.times,
            cached=seq.pages.reused,
        )
        self._tell(seq, event)

    def _finish(self, seq: Sequence) -> None:
        result = judged(seq, seq.strategy.finished(seq, result_of(self.lm, seq.decoding, seq.outcome())))
        stream, holes = seq.text, seq.request.holes
        rest = result.tokens[len(stream.tokens) :]
        first = seq.canvas.start + len(stream.tokens)
        positions = [at for hole in holes for at in hole] if holes else range(first, first + len(rest))
        if seq.recorder is not None:
            finish(seq.recorder, seq, result)
        seq.mark_first_block()
        self.finished += 1
        self.tokens += len(result.tokens)
        event = Event(
            request_id=seq.request_id,
            text="" if holes else stream.add(rest, last=True),
            tokens=tuple(rest),
            confidence=seq.confidence(positions),
            result=result,
            times=replace(seq.times, done=time.monotonic()),
            cached=seq.pages.reused,
        )
        self._end(seq, event)

    def _end(self, seq: Sequence, event: Event) -> None:
        """The last event of a request, once."""
        seq.final = event
        self._tell(seq, event)
        self.forget(seq)

    def _tell(self, seq: Sequence, event: Event) -> None:
        if not self._is_current(seq):
            return
        events, news = seq.log.events, self.news
        if not events or events[-1] is not event:
            events.append(event)
        if not (seq.log.private or (news and news[-1] is event)):
            news.append(event)

    def _is_current(self, seq: Sequence) -> bool:
        return self.sequences.get(seq.request_id) is seq


def _until_stop(tokens: Sized[int], stop: frozenset[int]) -> list[int]:
    if stop.isdisjoint(tokens):
        return list(tokens)
    ended = next(i for i, token in enumerate(tokens) if token in stop)
    return list(tokens[: ended + 1])
