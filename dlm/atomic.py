"""Files and folders that are either whole or absent: written beside, synced, renamed. All of `dlm` writes through here."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlm.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, never leaving half of it."""
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
        _sync(temporary)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp's 0600 would keep a shared folder from being shared
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path`; a `path` that another process finished first is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
