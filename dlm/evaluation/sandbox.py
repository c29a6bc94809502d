"""Programs that a model wrote, run where they can hurt nothing: `run_program`, and a pool of processes that run many.

A program gets namespaces of its own (no network, no other process, an empty folder, the system read-only, nobody's files or
environment), limits on memory, files, processes and time, and it has passed only when it ran to its end: what it prints and
its exit status say nothing. `zygote` is what runs inside. The kernel is shared: a flaw in the kernel is one here.
"""

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import LifoQueue

from dlm.errors import UserError
from dlm.evaluation.worker import USUAL, Limits, Verdict, Zygote


class Sandbox:
    """`workers` processes that run programs side by side; they start when they are first needed, and stay.

    `allow_unsandboxed` runs programs in your own account, with limits and a clock but no walls, where the machine has no
    namespaces; without it that is a UserError. A sandbox is a context manager that closes itself.
    """

    def __init__(self, workers: int | None = None, *, allow_unsandboxed: bool = False, limits: Limits = USUAL) -> None:
        if workers is not None and workers < 1:
            raise UserError(f"Sandbox(): workers = {workers} must be at least 1")
        self.workers = workers or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else workers or 1
        self.allow_unsandboxed, self.limits = allow_unsandboxed, limits
        self.sandboxed = True
        self._idle: LifoQueue[Zygote | None] = LifoQueue()
        for _ in range(self.workers):
            self._idle.put(None)

    def run(self, source: str, timeout: float = 3.0) -> Verdict:
        """Run one program; any thread may call this, and waits while all workers are busy."""
        _check(source, timeout)
        with self._worker() as zygote:
            return zygote.run(source, timeout)

    def run_all(
        self, sources: Sequence[str], timeout: float = 3.0, tick: Callable[[int], None] | None = None
    ) -> list[Verdict]:
        """Run many, as many at a time as there are workers; verdicts are in the order of `sources`."""

        def one(source: str) -> Verdict:
            found = self.run(source, timeout)
            if tick is not None:
                tick(1)
            return found

        if not sources:
            return []
        with self._worker():  # where there is no sandbox this says so, once
            pass
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(one, sources))

    @contextmanager
    def _worker(self) -> Iterator[Zygote]:
        zygote = self._idle.get()
        try:
            if zygote is not None and not zygote.alive:
                zygote.close()
                zygote = None
            if zygote is None:
                zygote = self._start()
            yield zygote
        except BaseException:  # an interrupt, say: its answer must not go to the next program
            if zygote is not None:
                zygote.close()
                zygote = None
            raise
        finally:
            self._idle.put(zygote)

    def _start(self) -> Zygote:
        if self.sandboxed:
            try:
                return Zygote(limits=self.limits)
            except UserError:
                if not self.allow_unsandboxed:
                    raise
                self.sandboxed = False
        return Zygote(sandboxed=False, limits=self.limits)

    def close(self) -> None:
        """End all workers that are not busy."""
        while not self._idle.empty():
            if (zygote := self._idle.get()) is not None:
                zygote.close()
        for _ in range(self.workers):
            self._idle.put(None)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_program(source: str, timeout: float = 3.0, *, allow_unsandboxed: bool = False) -> Verdict:
    """Run Python source in the sandbox: `.passed` only if it ran to its end within `timeout` seconds; else `.reason`.

    Processes that run programs are kept between calls, as many as the machine has cores; threads may call this together.
    Raises UserError where the machine offers no sandbox, unless `allow_unsandboxed`.
    """
    return shared(allow_unsandboxed).run(source, timeout)


_shared: dict[tuple[int, bool], Sandbox] = {}
_lock = threading.Lock()


def shared(allow_unsandboxed: bool = False) -> Sandbox:
    """The pool behind `run_program`: one a process, closed at its end."""
    key = (os.getpid(), allow_unsandboxed)  # a fork must not talk to its parent's workers
    with _lock:
        if key not in _shared:
            _shared[key] = Sandbox(allow_unsandboxed=allow_unsandboxed)
            atexit.register(_shared[key].close)
        return _shared[key]


def _check(source: object, timeout: object) -> None:
    if not isinstance(source, str):
        raise UserError(f"run_program(): source must be Python source as text, not {type(source).__name__}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 3600:
        raise UserError(f"run_program(): timeout = {timeout!r:.40} must be a number of seconds from 0 to 3600")
