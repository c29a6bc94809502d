"""A run's folder: one run at a time writes into it, and it says whether the run in it is finished."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dlm.data.atomic import write_text
from dlm.errors import UserError
from dlm.training.checkpoint import digest

LOCK, FINISHED = ".lock", "finished.json"
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


# --- a finished run ---------------------------------------------------------------------------------------------------


def mark_finished(folder: Path, config: dict[str, Any], **facts: Any) -> None:
    """Note that the final model in the folder is this config's; `facts` are the run's results."""
    files = [path for pattern in ("*config.json", "*.safetensors") for path in folder.glob(pattern)]
    digests = {path.name: digest(path).model_dump() for path in files}
    write_text(folder / FINISHED, json.dumps({**facts, "files": digests, "config": config}, indent=1) + "\n")


def finished(folder: Path) -> dict[str, Any] | None:
    """What `mark_finished` noted, or None; whether the model is still whole is not looked at."""
    try:
        found = json.loads((folder / FINISHED).read_text(encoding="utf-8"))
        return found if {"step", "bound", "bits_per_byte", "files", "config"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None
