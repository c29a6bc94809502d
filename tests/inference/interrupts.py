"""Ctrl-C at any line of a step: `python -m tests.inference.interrupts [tries]` counts wrong texts, stuck engines and leaks.

A try lets an engine decode a few requests, and a trace function raises KeyboardInterrupt at a random line of the engine's
room; or a real signal comes at a random time. Then the engine has to go on as if only the requests under way had ended.
"""

import argparse
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import dlm
from dlm.inference import Interrupted

from .requests import FAMILIES, MIXED, prompts
from .tiny import tiny_lm

ROOM = str(Path(dlm.__file__).parent / "inference")


class Raises:
    """A trace function that raises at the n-th line of the room; `lines` are those it has seen."""

    def __init__(self, at: int) -> None:
        self.at, self.lines, self.where = at, 0, ""

    def __call__(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(ROOM) or code.co_qualname.startswith("HeldInterrupts."):
            return None  # the latter are where a signal is held
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


class Signals:
    """A real Ctrl-C after so many seconds."""

    def __init__(self, after: float) -> None:
        self.after, self.where = after, "signal"

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        self.handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, self.after)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)
        signal.signal(signal.SIGINT, self.handler)


class Trial:
    """One family's engine, and what its requests give when nothing happens."""

    def __init__(self, family: str) -> None:
        self.lm = tiny_lm(9, spread=0.5, **FAMILIES[family])
        self.cache = "dual" if family == "llada" else "exact"
        self.work = [(prompt, MIXED[i % len(MIXED)]) for i, prompt in enumerate(prompts(6))]
        self.truth = [dlm.generate(self.lm, [p], cache=self.cache, **s)[0].tokens for p, s in self.work]
        with Raises(0) as count:
            self.everything(self.engine(), [], {})
        self.lines = count.lines
        started = time.perf_counter()
        self.everything(self.engine(), [], {})
        self.seconds = time.perf_counter() - started

    def engine(self) -> dlm.Engine:
        return dlm.Engine(self.lm, cache=self.cache, page_size=4, num_pages=18, max_num_tokens=72, max_num_requests=4)

    def everything(self, engine: dlm.Engine, names: list[str], told: dict) -> None:
        """Requests that are added, one that is cancelled, a call of `generate` beside them, and all that follows."""
        for i, (prompt, settings) in enumerate(self.work[:4]):
            names.append(f"r{i}")
            engine.add_request(prompt, request_id=names[-1], **settings)
        engine.cancel(names[3])
        names.pop()
        self.keep(engine.step(), told)
        prompt, settings = self.work[4]
        told["own"] = engine.generate([prompt], **settings)[0].tokens
        while engine.has_work:
            self.keep(engine.step(), told)

    @staticmethod
    def keep(events: list, told: dict) -> None:
        for event in events:
            if event.result is not None:
                told[event.request_id] = event.result.tokens
            elif event.error is not None:
                told[event.request_id] = None

    def one(self, interrupt: Raises | Signals) -> Counter:
        """One interrupt; what went wrong, by its kind."""
        engine, names, told = self.engine(), [], {}
        found: Counter = Counter()
        try:
            with interrupt:
                self.everything(engine, names, told)
        except Interrupted as partial:
            found["interrupted"] += 1
            if any(r.finish_reason != "interrupted" and r.tokens != self.truth[4] for r in partial.results):
                found["wrong"] += 1
        except KeyboardInterrupt:
            found["interrupted"] += 1
        for _ in range(300):
            if not engine.has_work:
                break
            self.keep(engine.step(), told)
        found["stuck"] += engine.has_work
        for name in set(names) & set(told):
            found["wrong"] += told[name] is not None and told[name] != self.truth[int(name[1])]
        for name in set(names) - set(told):
            events = list(engine.stream_of(name)) if name in engine.batch.ended else []
            if not events and name == names[-1]:
                continue  # it was interrupted while it was added
            self.keep(events[-1:], told)
            found["lost"] += name not in told and name != "r3"
        found["wrong"] += told.get("own", self.truth[4]) != self.truth[4]
        found["leak"] += engine.stats().pages_used > 0 or bool(engine.batch.sequences)
        again = engine.generate([self.work[0][0]], **self.work[0][1])[0].tokens
        found["wrong"] += again != self.truth[0]
        found["leak"] += engine.stats().pages_used > 0
        if any(found[kind] for kind in ("stuck", "wrong", "lost", "leak")):
            print(f"  {interrupt.where}: {dict(found)}", file=sys.stderr)
        return found


def run(tries: int, seed: int = 0) -> Counter:
    """So many interrupts, half of them in families with an exact cache, a fifth of them real signals."""
    draw = random.Random(seed)
    trials = [Trial("llada"), Trial("sdar")]
    total: Counter = Counter()
    for number in range(tries):
        trial = trials[number % 2]
        real = number % 5 == 4
        total["tries"] += 1
        at = draw.uniform(1e-6, trial.seconds) if real else draw.randrange(1, trial.lines)
        total += trial.one(Signals(at) if real else Raises(at))
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tries", nargs="?", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counted = run(given.tries, given.seed)
    kinds = ("tries", "interrupted", "wrong", "stuck", "lost", "leak")
    print(", ".join(f"{counted[kind]} {kind}" for kind in kinds))
