"""Everybody calls one engine: `python -m tests.inference.stress [deeds]` counts what goes wrong.

Eight threads and fifty tasks add requests, follow them, cancel them, decode beside each other, and now and then close the
engine, while another thread steps it. Every text must be the one that its request gives alone.
"""

import argparse
import asyncio
import random
import threading
import time
from collections import Counter
from contextlib import suppress

import dlm
from dlm.errors import UserError

from .requests import FAMILIES, MIXED, prompts
from .tiny import tiny_lm

THREADS, TASKS = 8, 50
EXPECTED = ("under way", "is closed", "was closed")
"""What a UserError may say: a request had ended, or an engine."""


class Stress:
    """Engines one after the other, each until it is closed; `counts` are of deeds and of failures."""

    def __init__(self, family: str, deeds: int, seed: int) -> None:
        self.lm = tiny_lm(9, spread=0.5, **FAMILIES[family])
        self.cache = "dual" if family == "llada" else "exact"
        self.work = [(prompt, settings) for prompt in prompts(5) for settings in MIXED]
        self.truth = [dlm.generate(self.lm, [p], cache=self.cache, **s)[0].tokens for p, s in self.work]
        self.left, self.seed = deeds, seed
        self.counts: Counter = Counter()
        self.lock = threading.Lock()
        self.failures: list[str] = []
        self.engine = self.new()

    def new(self) -> dlm.Engine:
        return dlm.Engine(self.lm, cache=self.cache, page_size=4, num_pages=30, max_num_tokens=160, max_num_requests=12)

    def note(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def take(self) -> bool:
        """Whether there is one more deed to do."""
        with self.lock:
            self.left -= 1
            self.counts["deeds"] += self.left >= 0
            return self.left >= 0

    def check(self, which: int, tokens: list[int]) -> None:
        self.note("texts")
        if tokens != self.truth[which]:
            self.failures.append(f"request {which} gave {tokens}, alone {self.truth[which]}")

    def events(self, which: int, events: list) -> None:
        """All that was told of one request that nobody cancelled."""
        last = events[-1]
        if last.error is not None:
            self.expected(last.error)
        else:
            self.check(which, last.result.tokens)
            if [t for event in events for t in event.tokens] != last.result.tokens:
                self.failures.append(f"events of request {which} do not add up")

    def expected(self, message: str) -> None:
        self.note("refusals")
        if not any(part in message for part in EXPECTED):
            self.failures.append(message)

    def guarded(self, deed, *args) -> None:
        try:
            deed(*args)
        except UserError as error:
            self.expected(str(error))
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def drive(self) -> None:
        """Step whatever engine there is; open a new one when it is closed."""
        while self.left > 0 or self.engine.has_work:
            if self.engine.has_work:
                self.guarded(self.engine.step)
            elif self.engine.closed:
                if self.engine.stats().pages_used or self.engine.batch.sequences:
                    self.failures.append("a closed engine holds pages")
                self.engine = self.new()
            else:
                time.sleep(0.0005)

    def act(self, draw: random.Random) -> None:
        """One deed of a thread."""
        engine, which, deed = self.engine, draw.randrange(len(self.work)), draw.random()
        prompt, settings = self.work[which]
        if deed < 0.01:
            engine.close()
            self.note("closes")
        elif deed < 0.1:
            self.check(which, engine.generate([prompt], **settings)[0].tokens)
        else:
            name = engine.add_request(prompt, **settings)
            if deed < 0.4:
                time.sleep(draw.random() * 0.01)
                engine.cancel(name)
                self.note("cancels")
            else:
                self.events(which, list(engine.stream_of(name)))

    def thread(self, number: int) -> None:
        draw = random.Random(f"{self.seed}/{number}")
        while self.take():
            self.guarded(self.act, draw)

    async def task(self, number: int) -> None:
        draw = random.Random(f"{self.seed}/task {number}")
        while self.take():
            engine, which, deed = self.engine, draw.randrange(len(self.work)), draw.random()
            prompt, settings = self.work[which]
            try:
                name = engine.add_request(prompt, **settings)
                events = []

                async def follow(engine=engine, name=name, events=events):
                    async for event in engine.astream_of(name):
                        events.append(event)

                if deed < 0.3:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(follow(), draw.random() * 0.02)
                    if not events or not events[-1].last:
                        engine.cancel(name)
                        self.note("cancels")
                else:
                    await follow()
                    self.events(which, events)
            except UserError as error:
                self.expected(str(error))
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    async def tasks(self) -> None:
        await asyncio.gather(*(self.task(number) for number in range(TASKS)))

    def run(self) -> Counter:
        actors = [threading.Thread(target=self.thread, args=(number,)) for number in range(THREADS)]
        actors.append(threading.Thread(target=lambda: asyncio.run(self.tasks())))
        driver = threading.Thread(target=self.drive)
        for thread in (*actors, driver):
            thread.start()
        for thread in (*actors, driver):
            thread.join()
        self.engine.close()
        if self.engine.stats().pages_used or self.engine.batch.sequences:
            self.failures.append("the last engine holds pages")
        self.counts["failures"] = len(self.failures)
        return self.counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deeds", nargs="?", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for family in ("sdar", "llada"):
        stress = Stress(family, given.deeds // 2, given.seed)
        counted = stress.run()
        kinds = ("deeds", "texts", "cancels", "closes", "refusals", "failures")
        print(family, ", ".join(f"{counted[kind]} {kind}" for kind in kinds), *stress.failures[:10], sep="\n  ")
