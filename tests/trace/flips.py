"""Bits flipped in a store's file: whatever is done with it then ends soon, with the truth or with an error.

    python -m tests.trace.flips --flips 5000 --seed 0      # prints a summary; exit status 1 if anything is wrong

Each time one bit (sometimes a few) of a small whole store is another. Then it is listed, searched, checked and read, by id and
one after the other. Wrong: a trace, an id or a time that was never stored, an error that is none of ours, or a check that finds
nothing where something is missing or unreadable. Slow: any of these takes longer than five seconds.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlm.errors import UserError
from dlm.trace import TraceStore
from dlm.trace.facts import digest
from tests.trace.conftest import PIECES
from tests.trace.worker import given, made, summed

SLOW = 5.0  # seconds of CPU time: on a busy machine, too, a walk without end is told from a slow one
STUCK = 300.0  # seconds by the clock
TRACES = 120


def whole(path: Path) -> tuple[dict[str, bytes], dict[str, int]]:
    """A store with contexts, pieces and a dictionary: digests and times by id."""
    with TraceStore(path, "none") as store:
        store.add_pieces("tok", PIECES)
        for i in range(TRACES):
            store.put(made(f"r{i}", i, i % 4))
        store.train_dict(size=2048)
        store.recompress()
        return {trace.request_id: digest(trace) for trace in store}, {row.request_id: row.at for row in store.ls()}


class Flips:
    """Counts of what came of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path, self.rng = folder / "traces.db", random.Random(seed)
        self.digests, self.times = whole(self.path)
        self.content = self.path.read_bytes()
        self.used = [place for place, byte in enumerate(self.content) if byte]
        self.faults: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.log: list[str] = []
        self.longest = 0.0

    def flip(self) -> None:
        rotten = bytearray(self.content)
        # Most of a small store's pages is empty: rarely there.
        used = self.rng.random() < 0.8
        places = [
            8 * (self.rng.choice(self.used) if used else self.rng.randrange(len(rotten))) + self.rng.randrange(8)
            for _ in range(self.rng.choice((1, 1, 1, 1, 3)))
        ]
        for place in places:
            rotten[place // 8] ^= 1 << place % 8
        for end in ("-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)
        self.path.write_bytes(rotten)
        self.what = f"bits {places}"
        faulthandler.dump_traceback_later(STUCK, exit=True)
        store = self._timed("open", lambda: TraceStore(self.path, create=False))
        if store is not None:
            try:
                self._use(store)
            finally:
                store.close()
        faulthandler.cancel_dump_traceback_later()

    def _use(self, store: TraceStore) -> None:
        report = self._timed("fsck", store.fsck)
        rows = self._timed("ls", store.ls)
        for row in rows or ():
            if self.times.get(row.request_id) != row.at:
                self._fault("wrong", f"ls: {row}")
        self._timed("find", lambda: store.find(model="m1"))
        self._timed("stats", store.stats)
        self._timed("pieces", lambda: store.pieces("tok"))
        right = 0
        for name in self.rng.sample(sorted(self.digests), 6 if report is None or not report.ok else TRACES):
            right += self._right("read", self._timed("read", lambda name=name: store[name]), name)
        for trace in self._timed("iterate", lambda: list(store)) or ():
            self._right("iterate", trace, trace.request_id)
        if report is not None:
            self.seen["fsck finds it" if not report.ok else "nothing to find"] += 1
            if report.ok and (rows is None or len(rows) != TRACES or right != TRACES or report.traces != TRACES):
                self._fault("wrong", "fsck finds nothing, but something is missing")

    def _right(self, what: str, trace: Any, name: str) -> int:
        if trace is None:
            return 0
        if digest(trace) != self.digests.get(name) or trace.at != self.times[name]:
            self._fault("wrong", f"{what}: {name}")
        return 1

    def _timed(self, what: str, work: Callable[[], Any]) -> Any:
        """The result; None where there is an error of ours."""
        started = time.process_time()
        try:
            return work()
        except UserError:
            self.seen[f"error from {what}"] += 1
            return None
        except Exception as error:
            self._fault("wrong", f"{what}: {error!r}")
            return None
        finally:
            took = time.process_time() - started
            self.longest = max(self.longest, took)
            if took > SLOW:
                self._fault("slow", f"{what}: {took:.1f} s")

    def _fault(self, kind: str, what: str) -> None:
        self.faults[kind] += 1
        self.log.append(f"{kind}: {self.what}: {what}"[:500])


def flips(folder: Path, count: int, seed: int) -> Flips:
    """Flip so many times."""
    done = Flips(folder, seed)
    for number in range(count):
        done.flip()
        if (number + 1) % 500 == 0:
            print(f"{number + 1} flips, {sum(done.faults.values())} faults", file=sys.stderr, flush=True)
    return done


if __name__ == "__main__":
    options = given(__doc__, flips=5000, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        done = flips(Path(folder), options.flips, options.seed)
    print(dict(sorted(done.seen.items())))
    print(f"{options.flips} flips of {len(done.content):,} bytes, seed {options.seed}, longest {done.longest:.2f} s:")
    raise SystemExit(summed(done, "wrong", "slow"))
