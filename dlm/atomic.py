"""Writes files and folders so that they are whole or absent: into a temporary one, synced, then renamed."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlm.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Replace a file's content by `text`, all or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file in the same folder that becomes `path` when the block ends well.

    A device or a pipe is not replaced: it is `path` itself that is written to.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _ready(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path`; a `path` that another process finished first is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_folder(path, path.parent) as work:
        yield work
        for file in (*work.iterdir(), work):
            _ready(file)
        try:
            work.rename(path)
        except OSError:
            if not path.is_dir():
                raise


@contextmanager
def filled(
    path: Path, *, order: Callable[[Path], Any], outdated: Callable[[Path, set[str]], set[str]]
) -> Iterator[Path]:
    """A temporary folder whose files take their places in `path` when the block ends well.

    A new folder appears at once. In one that is there, files are replaced one by one, sorted by `order`; then those are
    deleted that `outdated` names, given the folder and the names of the new files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Inside a folder that is there: it may be on another disk than its parent, or its parent read-only.
    with _temporary_folder(path, path if path.is_dir() else path.parent) as work:
        yield work
        files = sorted(work.iterdir(), key=order)
        for file in (*files, work):
            _ready(file)
        if not path.exists():
            work.rename(path)
        else:
            for file in files:
                file.replace(path / file.name)
            for name in outdated(path, {file.name for file in files}):
                (path / name).unlink()
            sync(path)
        sync(path.parent)


@contextmanager
def _temporary_folder(path: Path, where: Path) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=where))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def cache_folder() -> Path:
    """Where tokenised corpora and puzzles are kept: DLM_CACHE, else `dlm` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DLM_CACHE") or Path(base) / "dlm")


def check_writable(folder: Path, name: str) -> None:
    """Make the folder, and refuse one that no file can be written into; `name` says what names it, as in `output =`."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{name} {folder} is a file: give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{name} {folder}: cannot be written to ({error.strerror}): choose another folder") from error


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _ready(path: Path) -> None:
    """Synced, and as readable for others as the user's umask has it: temporary files are made for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
    sync(path)
