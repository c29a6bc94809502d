"""A run's folder: locks it for one run, refuses to resume another config, and notes that a run is finished."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from dlm.atomic import write_text
from dlm.errors import UserError
from dlm.fields import flat
from dlm.training import checkpoint
from dlm.training.config import TrainConfig
from dlm.training.digests import Digest, Name, differing, digests

LOCK = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
FINISHED = "finished.json"
Measured = tuple[float, float | None] | None  # a mean and its standard error
# Changing these between stop and resume does not change the numbers that a run computes.
FREE = {"log", "watch", "profile", "checkpoint", "eval", "data.prefetch", "data.cache", "train.gradient_checkpointing"}
FREE |= {f"train.{name}" for name in ("out", "resume", "threads", "device", "precision", "save_dtype")} | {
    "adapter.merge"
}
EXTENDABLE = {"train.steps", "train.decay_steps"}  # under some schedules
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
    except (ValueError, KeyError, TypeError):  # the lock's owner has not written its name yet
        return "another process"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """While writing into the run folder: turns a full disk or a read-only folder into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        where = getattr(error, "filename", None) or folder
        raise UserError(
            f"train.out = {str(folder)!r}: cannot write {where}: {why}; make room or give another train.out"
        ) from error


def other_settings(saved: dict[str, Any], config: TrainConfig) -> Iterator[tuple[str, object, object]]:
    """Dotted keys that differ and would change the numbers of a run, with the saved value and the config's.

    A setting that the saved config lacks, because an earlier version wrote it, had its default.
    """
    free = FREE | EXTENDABLE if config.extendable else FREE
    tables = (saved, config.model_dump(mode="json"), TrainConfig().model_dump(mode="json"))
    was, now, defaults = map(flat, tables)
    for key in sorted({*was, *now}):
        pair = was.get(key, defaults.get(key)), now.get(key)
        if pair[0] != pair[1] and free.isdisjoint((key, key.partition(".")[0])):
            yield key, *pair


def check_same_run(saved: Path, config: TrainConfig) -> None:
    """Refuse to resume under another config, where the difference would change the numbers."""
    for key, was, now in other_settings(json.loads((saved / "config.json").read_text()), config):
        raise UserError(
            f"{saved}: was written with {key} = {was!r}, but now {key} = {now!r}; "
            "resume with the same config, give another train.out, or set train.resume = false"
        )


class Finished(BaseModel, extra="forbid"):
    """finished.json beside the final model: the run's last step, its results, its config, its files."""

    step: int
    bound: Measured
    bits_per_byte: Measured
    files: dict[Name, Digest]
    config: dict[str, Any]


def note(config: TrainConfig, step: int, bound: Measured, bits_per_byte: Measured) -> None:
    """Write finished.json, after the model."""
    out = Path(config.train.out)
    files = digests(out, (path.name for kind in ("*config.json", "*.safetensors") for path in out.glob(kind)))
    facts = {"step": step, "bound": bound, "bits_per_byte": bits_per_byte, "files": files}
    found = Finished.model_validate({**facts, "config": config.model_dump(mode="json")})
    write_text(out / FINISHED, found.model_dump_json(indent=1) + "\n")


def finished(config: TrainConfig) -> Finished | None:
    """What finished.json says, if it is of the run that `config` describes and that is at its last step."""
    try:
        found = Finished.model_validate_json((Path(config.train.out) / FINISHED).read_bytes())
    except (OSError, ValidationError):
        return None
    same = not any(other_settings(found.config, config))
    return found if same and found.step >= config.train.steps else None


def is_whole(found: Finished, config: TrainConfig) -> bool:
    """Whether the final model and the newest checkpoint, if there is one, are as they were written."""
    out = Path(config.train.out)
    newest = checkpoint.found(out / "checkpoints")[:1]
    right = all(checkpoint.step_of(path) == found.step and not checkpoint.damage(path) for path in newest)
    return right and not any(differing(out, found.files))
