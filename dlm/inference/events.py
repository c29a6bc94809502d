"""What an engine tells: news of requests, what a step changed, and counts of what it holds."""

from collections.abc import Iterator
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dlm.inference.request import Generation, StepEvent

if TYPE_CHECKING:
    from dlm.inference.canvas import Decision
    from dlm.inference.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Times:
    """When things happened to a request, on `time.monotonic`'s clock; None for what did not happen yet."""

    queued: float = 0.0
    started: float | None = None
    """It took part in a step for the first time."""
    first_block: float | None = None
    """Its first tokens were given out."""
    done: float | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """News of one request: text that will not change any more, and its result when it is finished."""

    request_id: str
    text: str = ""
    tokens: tuple[int, ...] = ()
    """Committed ids that follow those of the event before."""
    confidence: tuple[float, ...] | None = None
    """p of each of these tokens at the step that committed it; for requests with `confidence=True`."""
    result: Generation | None = None
    error: str | None = None
    """Why it ended without a result."""
    times: Times = Times()
    cached: int = 0
    """Positions of its prompt that the exact cache held already, from a request with the same beginning."""

    @property
    def last(self) -> bool:
        """Whether the request has ended with this event."""
        return self.result is not None or self.error is not None


@dataclass(eq=False)
class Log:
    """All events of a request so far, or of several, for whoever follows them."""

    requests: "list[Sequence]" = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    private: bool = False
    """Whether its events go to its follower alone."""
    kept: bool = True
    """Whether those who ask after its end find it."""
    closed: bool = False
    """Whether no further event will come."""

    def since(self, number: int) -> tuple[list[Event], bool]:
        """Its events from that number on, and whether they are all; other threads may be adding to them."""
        closed = self.closed  # read first: what is added before it is closed is then among them
        return self.events[number:], closed


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What an engine has done, and what it holds."""

    running: int
    waiting: int
    finished: int
    nfe: int
    """Forward passes of the packed batch."""
    tokens: int
    """Generated, of finished requests, up to and including end-of-text."""
    rows: int
    """Positions that went through the network."""
    pages_used: int
    pages_free: int
    """Blank ones and those that are only kept for prompts with the same beginning."""
    pages_cached: int
    preemptions: int


def step_events(results: "Sized[tuple[Sequence, Decision]]") -> Iterator[StepEvent]:
    """What a forward changed, before it is applied; one event for all requests that have had as many steps."""
    for place in sorted({(seq.step, seq.nfe) for seq, _ in results}):
        rows = [(seq, decision) for seq, decision in results if (seq.step, seq.nfe) == place]
        longest = max(seq.canvas.length for seq, _ in rows)
        canvas = torch.full((len(rows), longest), rows[0][0].canvas.mask_id)
        changes = torch.zeros(3, len(rows), longest, dtype=torch.bool)
        drafts = any(decision.drafted is not None for _, decision in rows)
        refused, taken = torch.full_like(canvas, -1), torch.zeros_like(changes[0])
        for i, (seq, decision) in enumerate(rows):
            canvas[i, : seq.canvas.length] = torch.from_numpy(seq.canvas.after(decision))
            for kind, flags in enumerate((decision.commit, decision.edited, decision.remasked)):
                if flags is not None:
                    changes[kind, i, torch.from_numpy(seq.canvas.columns[flags])] = True
            if decision.drafted is not None:
                kept = decision.commit & (decision.drafted == decision.token)
                gone = (decision.drafted >= 0) & ~kept
                taken[i, torch.from_numpy(seq.canvas.columns[kept])] = True
                refused[i, torch.from_numpy(seq.canvas.columns[gone])] = torch.from_numpy(decision.drafted[gone])
        yield StepEvent(
            step=place[0],
            nfe=place[1],
            request_ids=tuple(seq.request_id for seq, _ in rows),
            prompt_lengths=tuple(seq.request.prompt_length for seq, _ in rows),
            lengths=tuple(seq.canvas.length for seq, _ in rows),
            canvas=canvas,
            committed=changes[0],
            edited=changes[1],
            remasked=changes[2],
            refused=refused if drafts else None,
            drafted=taken if drafts else None,
        )


def masked_event(seq: "Sequence") -> StepEvent:
    """A request's holes were masked again, in the step before the one that it has come to."""
    canvas, length = seq.canvas, seq.canvas.length
    nothing = torch.zeros(1, length, dtype=torch.bool)
    return StepEvent(
        step=seq.step - 1,
        nfe=seq.nfe,
        request_ids=(seq.request_id,),
        prompt_lengths=(seq.request.prompt_length,),
        lengths=(length,),
        canvas=torch.from_numpy(canvas.tokens[None, :length].copy()),
        committed=nothing,
        edited=nothing,
        remasked=torch.from_numpy(canvas.masked[None, :length].copy()),
    )
