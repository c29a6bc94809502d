"""Checkpoints of a run: written whole or not at all, newest first. Knows nothing of what is in them."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from dlm.errors import UserError

NAME = re.compile(r"step-\d+")


def publish(
    folder: Path,
    step: int,
    write: Callable[[Path], None],
    keep_last: int,
    main: bool = True,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Let `write` fill a temporary folder, flush it to disk, rename it into place, then drop all but the newest `keep_last`.

    Of many processes each one calls this and writes its part; `main` is True in one of them and `wait` is their barrier.
    """
    work = folder / f".writing-{step:08d}"
    if main:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    wait()
    write(work)
    wait()
    if main:
        seal(folder, step, work, keep_last)
    wait()


def seal(folder: Path, step: int, work: Path, keep_last: int) -> None:
    """Flush a filled temporary folder, rename it to its step's name, drop old checkpoints and what crashes left."""
    final = folder / f"step-{step:08d}"
    for path in [*work.rglob("*"), work]:
        sync(path)
    if final.exists():  # a step reached again after resuming from an earlier one
        shutil.rmtree(final)
    os.rename(work, final)
    sync(folder)
    for old in [*found(folder)[keep_last:], *folder.glob(".writing-*")]:
        shutil.rmtree(old)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def found(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first; a folder that a crash left half written has another name."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step after which a complete checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def check_same_run(checkpoint: Path, config: dict, free: set[str]) -> None:
    """Refuse to resume under another config, where the difference would change the numbers (`free` keys may differ)."""
    saved = json.loads((checkpoint / "config.json").read_text())
    for key, was, now in _differences(saved, config, ""):
        if key not in free and key.split(".")[0] not in free:
            raise UserError(
                f"{checkpoint}: was written with {key} = {was!r}, but now {key} = {now!r}; "
                "resume with the same config, give another train.out, or set train.resume = false"
            )


def _differences(old: dict, new: dict, prefix: str) -> list[tuple[str, object, object]]:
    changes = []
    for key in sorted({*old, *new}):
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            changes += _differences(was, now, f"{prefix}{key}.")
        elif was != now:
            changes.append((prefix + key, was, now))
    return changes
