"""What recording costs an engine: two engines in lockstep, one of them recording.

Both decode the same request with the same weights, a step each by turns, in random order. Only neighbouring steps are
compared, so whatever slows the machine for longer slows both. After each request the engines change places, so that a
place in memory is not taken for a cost.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from dlm.trace.store import TraceStore

Say = Callable[[str], object]
if TYPE_CHECKING:
    from dlm.inference.engine import Engine
    from dlm.models.lm import LM

BEGINNINGS = 20  # this many requests are timed and cancelled for each one that is decoded
PROMPT = "def area(radius):\n    return"
TEXT = (
    "Medians over pairs, with 95 % intervals by order statistics. The engine waits while it tells the recorder of each step and "
    "while it begins a request; all added up, with the CPU time of the thread that writes beside it. Both in % of the CPU time "
    "of the request's own thread."
)


@dataclass
class Side:
    """One of the two engines, with the nanoseconds of its steps."""

    engine: "Engine"
    length: int
    begin: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    step_cpu: list[int] = field(default_factory=list)
    """CPU time of the thread that calls `step`."""
    request: list[int] = field(default_factory=list)

    def submit(self, name: str) -> None:
        with timing(self.begin):
            self.engine.add_request(PROMPT, request_id=name, gen_length=self.length, steps=self.length)

    def go_on(self) -> None:
        with timing(self.step), timing(self.step_cpu, time.thread_time_ns):
            self.engine.step()

    def whole(self, name: str) -> None:
        with timing(self.request):
            self.engine.add_request(PROMPT, request_id=name, gen_length=self.length, steps=self.length)
            while self.engine.has_work:
                self.engine.step()


@contextmanager
def timing(taken: list[int], clock: Callable[[], int] = time.perf_counter_ns) -> Iterator[None]:
    """Add the block's nanoseconds to `taken`."""
    started = clock()
    yield
    taken.append(clock() - started)


@contextmanager
def timed_notes() -> Iterator[list[int]]:
    """The nanoseconds of every call of an engine that tells a recorder of a step."""
    from dlm.inference import batch

    taken: list[int] = []
    original = batch.note

    def note(*what: Any) -> None:  # a call of microseconds: without `timing`, which takes some itself
        started = time.perf_counter_ns()
        original(*what)
        taken.append(time.perf_counter_ns() - started)

    with patch.object(batch, "note", note):
        yield taken


def measure(lm: "LM", requests: int, length: int, say: Say) -> list[dict[str, Any]]:
    """Rows of what recording adds, in microseconds and per cent."""
    from dlm.inference.engine import Engine

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, TraceStore(Path(folder) / "traces.db") as store:
        one, two = Engine(lm, trace=store), Engine(lm, trace=store)
        recording, off, on = one.recording, Side(one, length), Side(two, length)

        def by_turns() -> tuple[Side, Side]:
            return (off, on) if rng.random() < 0.5 else (on, off)

        def swap() -> None:
            off.engine, on.engine = on.engine, off.engine
            off.engine.recording, on.engine.recording = None, recording

        for number in range(2):  # fills caches, starts the thread
            swap()
            for side in (off, on):
                side.whole(f"first {number}")
                side.request.clear()
        store.flush()
        before = _writer_seconds()
        for number in range(requests):
            swap()
            for _ in range(BEGINNINGS):
                for side in by_turns():
                    side.submit("cancelled")
                    side.engine.cancel("cancelled")
            for side in by_turns():
                side.submit(f"steps {number}")
            while off.engine.has_work:
                for side in by_turns():
                    side.go_on()
            store.flush()
            say(f"recording: {number + 1} of {requests} requests in lockstep")
        writer = 1e6 * (_writer_seconds() - before) / requests
        with timed_notes() as notes:
            for number in range(requests):
                swap()
                for side in by_turns():
                    side.whole(f"whole {number}")
    note = float(np.median(notes)) / 1e3
    rows = {
        "a step, by the clock": _compared(off.step, on.step),
        "a step, CPU of its thread": _compared(off.step_cpu, on.step_cpu),
        "telling the recorder of a step": {"off": 0.0, "more": note, "pairs": len(notes)},
        "beginning a request": _compared(off.begin, on.begin),
        "the thread that writes, CPU of a trace": {"off": 0.0, "more": writer},
        "whole requests, by the clock": _compared(off.request, on.request),
    }
    begin = rows["beginning a request"]
    request = length * rows["a step, CPU of its thread"]["off"] + begin["off"]
    waits = length * note + begin["more"]
    sums = {"what the engine waits for, of a request": waits, "all added up, of a request": waits + writer}
    for what, more in sums.items():
        rows[what] = {"off": request, "more": more, "percent": 100 * more / request}
    return [{"what": what, **row} for what, row in rows.items()]


def _compared(off: list[int], on: list[int]) -> dict[str, Any]:
    """Medians of pairs, and the interval that holds the median ratio in 95 of 100 cases, whatever the distribution."""
    without, recorded = np.array(off, float) / 1e3, np.array(on, float) / 1e3
    percent = np.sort(100 * (recorded / without - 1))
    n, reach = len(percent), 1.96 * len(percent) ** 0.5 / 2
    low, high = (float(percent[int(np.clip(round(end), 0, n - 1))]) for end in (n / 2 - reach - 1, n / 2 + reach))
    return {
        "off": float(np.median(without)),
        "more": float(np.median(recorded - without)),
        "percent": float(np.median(percent)),
        "low": low,
        "high": high,
        "interval": f"{low:+.3f} to {high:+.3f}",
        "pairs": n,
    }


def _writer_seconds() -> float:
    """CPU time of the store's thread until now (on Linux)."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "dlm-trace-writer")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
