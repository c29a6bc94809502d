"""Programs that a model wrote, run where they can hurt nothing: `run_program`, and a pool of processes that run many.

A program gets namespaces of its own (no network, no other process, an empty folder, the system read-only, nobody's files or
environment), limits on memory, files, processes and time, and it has passed only when it ran to its end: what it prints and
its exit status say nothing. `zygote` is what runs inside. The kernel is shared: a flaw in the kernel is one here.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import LifoQueue
from typing import Any

from dlm.errors import UserError
from dlm.evaluation.zygote import BUSY

MIB = 2**20
GRACE = 60.0  # seconds a zygote may take beyond a program's own time before it counts as lost
START = 60.0  # seconds a zygote may take to start
SLICE = 0.5  # seconds between two looks at how long it takes
STARTED = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import zygote.serving; sys.path.pop(); zygote.serving.start()"
"""It imports nothing of ours but the zygote, and leaves programs a path without us."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a program."""

    passed: bool
    """Whether it ran to its end: no exception, no exit, no signal, in time."""
    reason: str
    """"passed", or in a few words why not: the exception, the signal, the limit."""
    output: str = ""
    """What it printed, stdout and stderr, cut after `Limits.output` bytes."""
    seconds: float = 0.0
    """Wall-clock time from its start to its end."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use."""

    memory: int = 1024 * MIB
    """Bytes of address space a process, and of memory all its processes together."""
    file_size: int = 1 * MIB
    """Bytes a file."""
    processes: int = 32
    output: int = 8192
    """Bytes kept of what it prints."""


class Zygote:
    """One process that forks a child for each program; programs run in it one after the other."""

    def __init__(self, sandboxed: bool = True, limits: Limits = Limits()) -> None:
        self.sandboxed, self.limits = sandboxed, limits
        self.folder = tempfile.TemporaryDirectory(prefix="dlm-sandbox-", ignore_cleanup_errors=True)
        where = "inside" if sandboxed else "outside"
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-c", STARTED, where, self.folder.name, *_readable()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},  # nothing of ours; and sets in one order
            start_new_session=True,
            bufsize=0,
        )
        first = self._answer(START)
        if not first.get("ready"):
            self.close()
            raise UserError(
                f"programs cannot be run in a sandbox here ({first.get('why', 'no answer')}): it needs Linux 5.12 or newer "
                "with user namespaces for this account (in a container, often --security-opt seccomp=unconfined); or allow "
                "programs to run unsandboxed, in your own account: --allow-unsandboxed"
            )

    def run(self, source: str, timeout: float) -> Verdict:
        """Run one program to its end, or for `timeout` seconds."""
        limits = self.limits
        request = {
            "source": source,
            "timeout": timeout,
            "memory": limits.memory,
            "address_space": limits.memory,
            "file_size": limits.file_size,
            "processes": limits.processes,
            "output": limits.output,
            "folder": self.folder.name,
        }
        body = json.dumps(request).encode()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(len(body).to_bytes(4, "little") + body)
        except BrokenPipeError:
            return Verdict(passed=False, reason="the sandbox was lost")
        found = self._answer(BUSY * timeout + GRACE)
        return Verdict(**found) if "passed" in found else Verdict(passed=False, reason="the sandbox was lost")

    @property
    def alive(self) -> bool:
        """Whether it can run another program."""
        return self.process.poll() is None

    def close(self) -> None:
        """End it, and whatever still runs in it."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def _answer(self, timeout: float) -> dict[str, Any]:
        """Its next message; an empty one, and the end of the process, where none comes in time."""
        self.patience = timeout
        head = self._read(4)
        body = self._read(int.from_bytes(head, "little")) if len(head) == 4 else b""
        return json.loads(body) if body else {}

    def _read(self, count: int) -> bytes:
        """Time counts while this process runs: not while the machine sleeps or both of us stand still."""
        assert self.process.stdout is not None
        found = b""
        while len(found) < count:
            if not select.select([self.process.stdout], [], [], SLICE)[0]:
                self.patience -= SLICE
                if self.patience <= 0:
                    self.process.kill()
                    break
            elif part := self.process.stdout.read(count - len(found)):
                found += part
            else:
                break
        return found if len(found) == count else b""


class Sandbox:
    """`workers` processes that run programs side by side; they start when they are first needed, and stay.

    `allow_unsandboxed` runs programs in your own account, with limits and a clock but no walls, where the machine has no
    namespaces; without it that is a UserError. A sandbox is a context manager that closes itself.
    """

    def __init__(
        self, workers: int | None = None, *, allow_unsandboxed: bool = False, limits: Limits = Limits()
    ) -> None:
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


def _readable() -> list[str]:
    """Folders that programs import from: the standard library, and where numpy lies."""
    spec = find_spec("numpy")
    installed = [str(Path(spec.origin).parent.parent)] if spec is not None and spec.origin else []
    return list(dict.fromkeys((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *installed)))
