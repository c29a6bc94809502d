"""The live view: a canvas on which masks become tokens, out of order, while they are decoded or from a trace."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from dlm.inference.request import StepEvent
    from dlm.trace.trace import Trace

MASK = "░"
GIVEN = -1  # "committed at step -1": the user's own text
# From just committed to settled: the eye follows the bright ones.
REFUSED = "strike red"
"""A drafted token that the model did not take."""
TAKEN = "underline "
"""Prefix to the style of a drafted token that the model took."""
HEAT = ("bold black on bright_yellow", "bold bright_yellow", "bright_green", "green", "cyan", "bright_blue")


class Canvas:
    """The state of the first request of a batch: its tokens, and the step at which each was committed."""

    def __init__(self, mask_id: int | None) -> None:
        self.mask_id = mask_id
        self.tokens = np.zeros(0, np.int64)
        self.when = np.zeros(0, np.int64)
        self.step, self.nfe = 0, 0
        self.request_id: str | None = None
        self.drafts: dict[int, int] = {}
        """Refused tokens by position; they are shown until the next step."""
        self.taken: set[int] = set()
        """Positions of drafted tokens that were taken."""

    def update(self, event: StepEvent) -> None:
        self.request_id = event.request_ids[0] if self.request_id is None else self.request_id
        if self.request_id not in event.request_ids:
            return  # the shown request is done, others of its batch are not
        row = list(event.request_ids).index(self.request_id)
        length = event.lengths[row]
        changed = np.asarray(event.committed)[row, :length] | np.asarray(event.edited)[row, :length]
        if len(self.when) < length:  # the first event, or an open-ended text that grew by a block
            self.when = np.pad(self.when, (0, length - len(self.when)), constant_values=GIVEN)
        self.step, self.nfe = event.step, event.nfe
        self.tokens = np.asarray(event.canvas)[row, :length]
        self.when[:length][changed] = event.step
        refused, taken = getattr(event, "refused", None), getattr(event, "drafted", None)
        if refused is not None and taken is not None:
            refused = np.asarray(refused)[row, :length]
            self.drafts = {int(at): int(refused[at]) for at in np.flatnonzero(refused >= 0)}
            self.taken |= set(np.flatnonzero(np.asarray(taken)[row, :length]).tolist())

    @property
    def masked(self) -> np.ndarray:
        return self.tokens == self.mask_id

    @property
    def filled(self) -> int:
        """Tokens the model has committed so far."""
        return int(((self.when[: len(self.tokens)] != GIVEN) & ~self.masked).sum())

    @property
    def share(self) -> float:
        return self.filled / max(1, self.filled + int(self.masked.sum()))

    def style(self, position: int) -> str:
        when = int(self.when[position])
        if when == GIVEN:
            return ""
        return TAKEN * (position in self.taken) + HEAT[min(self.step - when, len(HEAT) - 1)]


class View:
    """Shows a canvas while it fills: animated on a terminal, as a few plain snapshots elsewhere.

    `draw` turns a canvas into something rich can print. Use as a context, and hand `on_step` to the sampler.
    """

    def __init__(
        self,
        title: str,
        mask_id: int | None,
        draw: Callable[[Canvas], RenderableType],
        console: Console,
        delay: float,
        snapshots: int,
    ) -> None:
        self.title, self.draw, self.console, self.delay = title, draw, console, delay
        self.canvas = Canvas(mask_id)
        self.marks = [] if console.is_terminal else [(k + 1) / (snapshots + 1) for k in range(snapshots)]
        self.live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self.rested = 0.0  # seconds slept between pictures; not counted in the speed
        self.started = time.perf_counter()

    def __enter__(self) -> View:
        if self.live:
            self.live.start()
        self.started = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.live:
            if kind is KeyboardInterrupt:
                self.live.transient = False  # the last picture stays
            self.live.stop()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started - self.rested

    def on_step(self, event: StepEvent) -> None:
        self.canvas.update(event)
        if self.live:
            began = time.perf_counter()
            self.live.update(Group(self.header(), Text(), self.draw(self.canvas)), refresh=True)
            time.sleep(self.delay)
            self.rested += time.perf_counter() - began
        elif self.marks and self.canvas.share >= self.marks[0] and self.canvas.masked.any():
            while self.marks and self.canvas.share >= self.marks[0]:
                self.marks.pop(0)
            self.console.print(self.header(), self.draw(self.canvas), "", sep="\n")

    def header(self) -> Text:
        """`title · step 3 · 3 NFE · 24 of 45 tokens · 812 tokens/s`"""
        canvas = self.canvas
        total = canvas.filled + int(canvas.masked.sum())
        speed = canvas.filled / max(self.seconds, 1e-9)
        facts = f" · step {canvas.step} · {canvas.nfe} NFE · {canvas.filled} of {total} tokens · {speed:,.0f} tokens/s"
        return Text.assemble((self.title, "bold"), (facts, "dim"))


def draw_text(
    decode: Callable[[Sequence[int]], str], room: int, begin: Sequence[int] = ()
) -> Callable[[Canvas], RenderableType]:
    """A drawer of running text, cut to the last `room` lines so that a terminal need not scroll.

    `begin` are tokens that a tokenizer puts before texts, which the user did not write and need not see.
    """
    pieces: dict[int, str] = {}

    def piece(token: int) -> str:
        # Doubled, because some tokenizers drop the space before the first token of what they decode.
        if token not in pieces:
            pieces[token] = decode([token, token])[len(decode([token])) :]
        return pieces[token]

    def draw(canvas: Canvas) -> RenderableType:
        text, tokens = Text(), canvas.tokens.tolist()
        unseen = len(begin) if tokens[: len(begin)] == [*begin] else 0
        for position, token in enumerate(tokens[unseen:], start=unseen):
            shown = token != canvas.mask_id or position in canvas.taken or canvas.when[position] != GIVEN
            if position in canvas.drafts:
                text.append(piece(canvas.drafts[position]), REFUSED)
            if shown:
                text.append(piece(token), canvas.style(position))
            elif position not in canvas.drafts:
                text.append(MASK, "dim")
        lines = text.split("\n", allow_blank=True)
        return Text("\n").join(lines[-room:])

    return draw


def draw_sudoku(decode: Callable[[Sequence[int]], str]) -> Callable[[Canvas], RenderableType]:
    """A drawer of a 9 × 9 grid with its boxes: givens bold, masks as dots."""

    def draw(canvas: Canvas) -> RenderableType:
        text = Text()
        for position, token in enumerate(canvas.tokens.tolist()[:81]):
            row, column = divmod(position, 9)
            if column == 0 and row % 3 == 0:
                text.append(("┌───────┬───────┬───────┐\n", "├───────┼───────┼───────┤\n")[row > 0], "dim")
            if column % 3 == 0:
                text.append("│ ", "dim")
            if token == canvas.mask_id:
                text.append("· ", "dim")
            else:
                text.append(decode([token]), canvas.style(position) or "bold").append(" ")
            if column == 8:
                text.append("│\n", "dim")
        return text.append("└───────┴───────┴───────┘", "dim")

    return draw


def animate(trace: Trace, delay: float) -> None:
    """Show a stored trace step by step, each for `delay` seconds."""
    console = console_for(sys.stdout)
    decode = (lambda ids: "".join(f"{token} " for token in ids)) if trace.pieces is None else trace.pieces.text
    draw, canvas = draw_text(decode, room=console.height - 4), Canvas(trace.mask_id)
    canvas.when = np.full(trace.length, GIVEN)

    def frame(k: int) -> Group:
        canvas.step, canvas.tokens = k, trace.state(k)[: trace.length_at(k)]
        canvas.drafts = refused.get(k, {})
        step = f"step {k} of {trace.num_steps}"
        return Group(Text.assemble((f"{trace.request_id[:60]} ", "bold"), (step, "dim")), Text(), draw(canvas))

    from dlm.trace.events import ACCEPT, REJECT

    changed: dict[int, list[int]] = {}
    refused: dict[int, dict[int, int]] = {}
    for event in trace.events():
        if event.kind == REJECT:
            refused.setdefault(event.step + 1, {})[event.position] = event.token
            continue
        canvas.taken |= {event.position} if event.kind == ACCEPT else set()
        changed.setdefault(event.step + 1, []).append(event.position)
    with Live(frame(0), console=console, auto_refresh=False) as live:
        for k in range(1, trace.num_steps + 1):
            for position in changed.get(k, ()):
                canvas.when[position] = k
            if console.is_terminal:
                time.sleep(delay)
            live.update(frame(k), refresh=console.is_terminal or k == trace.num_steps)


def console_for(stream: Any = None) -> Console:
    """A console that never wraps or colours what is not shown on a terminal."""
    stream = sys.stdout if stream is None else stream
    return Console(file=stream, highlight=False, markup=False, soft_wrap=not stream.isatty())
