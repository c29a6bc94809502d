"""A shared library of C files: compiled when it is first needed, kept for later starts.

A kept library is code that this process runs. So it is taken only from a folder and a file that belong to this user
and that nobody else may write, and only if its content has the digest that its name says.
"""

import _ctypes
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dlm.kernels.c.compiler import BuildError, run

VERSION_SECONDS, COMPILE_SECONDS = 30.0, 300.0
"""How long a compiler may take to say its version, and to compile."""
LOG = logging.getLogger("dlm")


class Unsafe(Exception):
    """Somebody else may have written what lies there; the message is the rest of a sentence about it."""


def load(
    name: str, sources: Iterable[Path], command: list[str], flags: list[str], symbols: Iterable[str]
) -> ctypes.CDLL:
    """The library of these files, headers among them, from the cache or compiled by `command`; it has all the symbols.

    Raises BuildError. A damaged library in the cache is reported, removed and compiled anew.
    """
    version = run([*command, "--version"], VERSION_SECONDS)
    facts = [
        *(source.read_bytes() for source in sources),
        version,
        " ".join([*command, *flags]).encode(),
        _machine().encode(),
    ]
    stem = f"{name}-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:16]}"
    units = [str(source) for source in sources if source.suffix == ".c"]
    folder = _cache()
    try:
        found = None if folder is None else _kept(folder, stem, symbols)
        return found or _made([*command, *flags, *units], folder, stem, symbols)
    finally:
        if folder is not None:
            os.close(folder.handle)


class _Folder:
    """A folder of libraries and its open handle, through which files are read whatever its path leads to by then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _made(command: list[str], folder: _Folder | None, stem: str, symbols: Iterable[str]) -> ctypes.CDLL:
    """Compile in a private folder and load from there; then move the file into the cache, if there is one."""
    room = _private(folder)
    try:
        made = room / f"{stem}.so"
        run([*command, "-o", str(made), "-lm"], COMPILE_SECONDS)
        if not made.is_file():
            raise BuildError(f"{command[0]} ended without an error and wrote no library")
        made.chmod(0o700)
        file = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        digest = _digest(file)
        try:
            found = _loaded(file, made, symbols)
        except BuildError:
            os.close(file)
            raise
        if folder is not None:
            with suppress(OSError):  # the disk is full: it is compiled again next time
                os.fsync(file)
                made.replace(folder.path / f"{stem}-{digest}.so")
                os.fsync(folder.handle)
        return found
    except OSError as error:
        raise BuildError(f"{room}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)  # what is loaded stays loaded


def _private(folder: _Folder | None) -> Path:
    """A new folder that only this user may enter: inside the cache, or else among the temporary files."""
    if folder is not None:
        with suppress(OSError):  # read-only, or full
            return Path(tempfile.mkdtemp(prefix=".building-", dir=folder.path))
    try:
        return Path(tempfile.mkdtemp(prefix="dlm-"))
    except OSError as error:
        raise BuildError(f"there is no folder to compile in: {error}") from error


def _kept(folder: _Folder, stem: str, symbols: Iterable[str]) -> ctypes.CDLL | None:
    """The cached library, or None. One that must not be loaded is reported and removed."""
    for name in sorted(os.listdir(folder.handle)):
        if not (name.startswith(f"{stem}-") and name.endswith(".so")):
            continue
        path, file = folder.path / name, -1
        try:
            file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder.handle)
            _check_owner(file)
            if name != f"{stem}-{_digest(file)}.so":
                raise BuildError("is damaged")
            return _loaded(file, path, symbols)
        except FileNotFoundError:  # another process removed it
            continue
        except (OSError, BuildError, Unsafe) as error:
            why = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        LOG.warning("%s %s: it is compiled anew", path, why)
        with suppress(OSError):
            path.unlink()
        if file >= 0:
            os.close(file)
    return None


def _loaded(file: int, path: Path, symbols: Iterable[str]) -> ctypes.CDLL:
    """The library behind an open file: the one that was checked, whatever its path leads to by now.

    The file stays open, since the loader takes a library of the same name for the same library.
    """
    same = Path(f"/proc/self/fd/{file}")
    try:
        found = ctypes.CDLL(str(same if same.exists() else path))
    except OSError as error:
        raise BuildError(f"cannot be loaded ({error})") from error
    missing = [name for name in symbols if not hasattr(found, name)]
    if missing:
        _ctypes.dlclose(found._handle)  # or the next file behind this number would be taken for this library
        raise BuildError(f"lacks {missing[0]}")
    return found


def _digest(file: int) -> str:
    with open(file, "rb", closefd=False) as stream:
        return hashlib.sha256(stream.read()).hexdigest()[:16]


def _cache() -> _Folder | None:
    """$XDG_CACHE_HOME/dlm or ~/.cache/dlm, made if it is missing. None if it cannot be made or is not safe."""
    folder = None
    try:
        path = _base() / "dlm"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink():
            raise Unsafe("is a link")
        folder = _Folder(path)
        facts = os.fstat(folder.handle)
        if facts.st_uid == os.geteuid() and facts.st_mode & 0o077:
            with suppress(OSError):  # a disk that is read-only, or has no modes
                os.fchmod(folder.handle, 0o700)
        _check_owner(folder.handle)
        return folder
    except (OSError, RuntimeError):  # nobody may write there, or the user has no home
        return None
    except Unsafe as why:
        if folder is not None:
            os.close(folder.handle)
        LOG.warning("%s %s: compiled kernels are not kept there; set XDG_CACHE_HOME to a folder of yours", path, why)
        return None


def _base() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path.home() / ".cache"
    if not base.is_absolute():
        raise FileNotFoundError(f"{base} is not an absolute path")
    return base


def _check_owner(file: int) -> None:
    facts = os.fstat(file)
    if facts.st_uid != os.geteuid():
        raise Unsafe(f"belongs to user {facts.st_uid}, not to you ({os.geteuid()})")
    if facts.st_mode & 0o022:
        raise Unsafe("can be written by other users")
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        raise Unsafe("is not a file")


def _machine() -> str:
    """What a library depends on beside its source and compiler: machines that differ may share a home folder."""
    features = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    return " ".join([sys.platform, platform.machine(), libc or "", features])
