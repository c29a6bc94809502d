"""A process that runs programs one after the other, as the one who asks sees it: started, asked, ended. `zygote` runs in it."""

import json
import select
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
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


USUAL = Limits()


class Zygote:
    """One process that forks a child for each program; programs run in it one after the other."""

    def __init__(self, sandboxed: bool = True, limits: Limits = USUAL) -> None:
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


def _readable() -> list[str]:
    """Folders that programs import from: the standard library, and where numpy lies."""
    spec = find_spec("numpy")
    installed = [str(Path(spec.origin).parent.parent)] if spec is not None and spec.origin else []
    return list(dict.fromkeys((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *installed)))
