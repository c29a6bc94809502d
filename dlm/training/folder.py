"""A run's folder: one run at a time writes into it, and where nothing can be written a user reads why."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dlm.errors import UserError

LOCK = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[int] = set()  # open lock files, which a forked child must not keep locked


def _forget() -> None:
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make the folder and lock it; a UserError where that cannot be, or where another process has it.

    The operating system releases the lock when the process ends, however it ends. On a network file system it holds
    between machines if that has locks; where it has none, a run goes on without.
    """
    path = folder / LOCK
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(handle, folder)
        _held.add(handle)
        with writing(folder):  # also finds a full disk
            os.truncate(handle, 0)
            os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            os.fsync(handle)
        yield
        os.truncate(handle, 0)
    finally:
        if handle in _held:
            _held.discard(handle)
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"train.out = {str(folder)!r} is in use by {_owner(handle)}: wait for it, stop it, or give another train.out"
        ) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def _owner(handle: int) -> str:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):  # it has the lock, but has not written its name yet
        return "another process"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around writing into the run folder: a disk that is full or a folder that is read-only is a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        where = getattr(error, "filename", None) or folder
        raise UserError(
            f"train.out = {str(folder)!r}: cannot write {where}: {why}; make room or give another train.out"
        ) from error
