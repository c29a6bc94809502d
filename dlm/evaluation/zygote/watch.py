"""A running program seen from outside: its time, its memory, its processes, what it says; and its end."""

import os
import resource
import select
import signal
import time
from contextlib import suppress

from . import BUSY

POLL = 0.02  # seconds between two looks at how much memory and how many processes a program has
GAP = (
    1.0  # seconds between two looks that count at most: in longer ones this process stood still, and so did the program
)


def watch(
    request: dict, child: int, said: int, shown: int, started: float, proc: int | None
) -> tuple[bytes, bytes, str | None]:
    """Until the program ends, or must: what it reported, what it printed, and why it was ended."""
    allowed, spent, last = request["timeout"], 0.0, started
    process = os.pidfd_open(child)
    poll = select.poll()
    for descriptor in (said, shown, process):
        poll.register(descriptor, select.POLLIN)
    poll.register(0, 0)  # whoever asked is gone
    verdict = output = b""
    try:
        while True:
            now = time.monotonic()
            spent, last = spent + min(now - last, GAP), now
            if spent >= allowed:
                allowed = min(BUSY, 1 + _delayed(child, proc) / request["timeout"]) * request["timeout"]
                if spent >= allowed:
                    return verdict, output, f"timed out after {request['timeout']:g} s"
            for descriptor, event in poll.poll(1000 * min(POLL, allowed - spent) + 1):
                if descriptor == process:
                    return verdict, output + rest(shown)[: request["output"] - len(output)], None
                if descriptor == 0:
                    os._exit(1)
                part = os.read(descriptor, 1 << 16) if event & select.POLLIN else b""
                if not part:
                    poll.unregister(descriptor)
                elif descriptor == said:
                    verdict = (verdict + part)[:4096]
                else:
                    output += part[: request["output"] - len(output)]  # the rest is read and forgotten
            if (why := _excess(request, proc)) is not None:
                return verdict, output, why
    finally:
        os.close(process)


def _delayed(child: int, proc: int | None) -> float:
    """Seconds that the program was ready to run and had no processor: on a busy machine they are not its own."""
    if proc is None:
        return 0.0
    try:
        file = os.open(f"{child}/schedstat", os.O_RDONLY, dir_fd=proc)
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 200).split()[1]) / 1e9
    finally:
        os.close(file)


def _excess(request: dict, proc: int | None) -> str | None:
    """What a program and its children have too much of, all together."""
    if proc is None:
        return None
    others = [name for name in os.listdir(proc) if name.isdecimal() and name != "1"]
    if len(others) > request["processes"]:
        return f"more than {request['processes']} processes"
    pages = 0
    for name in others:
        try:
            file = os.open(f"{name}/statm", os.O_RDONLY, dir_fd=proc)
            try:
                fields = os.read(file, 200).split()
            finally:
                os.close(file)
        except OSError:  # it ended meanwhile
            continue
        pages += int(fields[1]) - int(fields[2]) if len(fields) > 2 else 0  # without what it shares with this process
    most = request["memory"]
    return f"more than {most >> 20} MiB of memory" if pages * resource.getpagesize() > most else None


def rest(descriptor: int) -> bytes:
    """What lies in a pipe, without waiting for more."""
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def kill(child: int, inside: bool) -> None:
    """All that runs in the namespace; without one, the program's process group."""
    with suppress(ProcessLookupError, PermissionError):
        if inside and os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)  # every process but this one, of this namespace alone
        else:
            os.killpg(child, signal.SIGKILL)


def reap() -> bool:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return False
    return True


def left(status: int) -> str:
    if status >= 0:
        return f"left before its end, with status {status}"
    named = {one.value: one.name for one in signal.Signals}
    return f"killed by {named.get(-status, f'signal {-status}')}"
