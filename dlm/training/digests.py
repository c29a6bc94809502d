"""Digests of files, which tell whether those in a folder are as they were written."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, StringConstraints

THREADS = 4  # hashlib releases the interpreter's lock
Name = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]
"""Of a file in the folder itself."""
T = TypeVar("T")


class Digest(BaseModel, strict=True, extra="forbid"):
    """Size in bytes and BLAKE2b-128 of one file."""

    size: int
    blake2b: str


def digests(folder: Path, names: Iterable[str]) -> dict[str, Digest]:
    """The digest of each of these files."""
    return _each(names, lambda name: _digest(folder / name))


def differing(folder: Path, files: Mapping[str, Digest]) -> Iterator[str]:
    """A message for each file that does not match its digest, beginning with its name."""
    problems = _each(sorted(files), lambda name: _difference(folder / name, files[name]))
    return (name + problem for name, problem in problems.items() if problem)


def _each(names: Iterable[str], job: Callable[[str], T]) -> dict[str, T]:
    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(job, names), strict=True))


def _digest(path: Path) -> Digest:
    with path.open("rb") as file:
        found = file_digest(file, lambda: blake2b(digest_size=16))
        return Digest(size=file.tell(), blake2b=found.hexdigest())


def _difference(path: Path, expected: Digest) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f" has {size:,} bytes instead of {expected.size:,}"
        return None if _digest(path) == expected else " has other bytes than were written (BLAKE2b differs)"
    except FileNotFoundError:
        return " is missing"
    except OSError as error:
        return f": {error.strerror}"
