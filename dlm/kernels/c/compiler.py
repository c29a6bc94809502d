"""The C compiler of this machine, as a command that may be missing, broken or endless."""

import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from threading import Event, Timer

OUTPUT_BYTES = 2**20
"""How much a compiler may print."""


class BuildError(Exception):
    """There is no library; the message is one line that says why."""


class NoCompiler(BuildError):
    """No compiler is installed, and CC names none."""


class Unfinished(BuildError):
    """The compiler was stopped: it took too long, or printed without end."""


def compiler() -> list[str]:
    """The compiler's command: CC, which may hold options, or the first of cc, gcc and clang that is installed."""
    if os.name != "posix":
        raise NoCompiler("libraries are compiled on Linux and macOS only")
    try:
        words = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"CC = {os.environ['CC']!r} is not a command: {error}") from error
    words = words or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    if not words:
        raise NoCompiler("no C compiler was found: install gcc or clang, or name one in CC")
    return words


def run(command: list[str], seconds: float) -> bytes:
    """What a command prints on both of its streams.

    BuildError if it cannot be run or fails; Unfinished if it takes longer than so many seconds or prints more than
    OUTPUT_BYTES. Nothing that it started goes on running then.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )
    except (OSError, ValueError) as error:
        raise BuildError(f"{command[0]} cannot be run: {getattr(error, 'strerror', None) or error}") from error
    assert process.stdout is not None

    late = Event()

    def stop() -> None:
        late.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        printed = process.stdout.read(OUTPUT_BYTES)
        if len(printed) == OUTPUT_BYTES:
            raise Unfinished(f"{command[0]} prints without end")
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            stop()
            process.wait()
        process.stdout.close()
    if late.is_set():
        raise Unfinished(f"{command[0]} did not end within {seconds:g} s")
    if status:
        raise BuildError(f"{command[0]} ended with status {status}{_reason(printed)}")
    return printed


def _reason(printed: bytes) -> str:
    """The first line that speaks of an error, or else the last one."""
    lines = [line.strip() for line in printed.decode(errors="replace").splitlines() if line.strip()]
    found = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
    return f": {found[:300]}" if found else ""
