"""Checkpoints of a run: written whole or not at all, each file with its digest, and the newest one that is whole."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from safetensors import SafetensorError

from dlm.errors import UserError

NAME = re.compile(r"step-\d+")
MANIFEST = "manifest.json"
FORMAT = 2  # 1 was accelerate's own, whose files had to be unpickled
ASIDE = "damaged-"  # before the name of a checkpoint that a run has passed over
THREADS = 4  # that compute digests; hashlib does not hold the interpreter's lock


Name = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]
"""Of a file in the folder itself."""


class Digest(BaseModel):
    """Size in bytes and BLAKE2b-128 of one file."""

    model_config = ConfigDict(strict=True, extra="forbid")
    size: int
    blake2b: str


class Manifest(BaseModel):
    """What a whole checkpoint consists of. It is the last file that is written."""

    model_config = ConfigDict(strict=True, extra="forbid")
    format: int
    step: int
    files: dict[Name, Digest]


@dataclass(frozen=True)
class Group:
    """The processes that share a checkpoint folder. `all_well(x)` is True when x was True in every one of them."""

    index: int = 0
    count: int = 1
    all_well: Callable[[bool], bool] = bool

    @property
    def main(self) -> bool:
        return self.index == 0

    def share(self, items: list[str]) -> list[str]:
        """This process's share of a list that is the same in all of them."""
        return items[self.index :: self.count]


ALONE = Group()


# --- writing ----------------------------------------------------------------------------------------------------------


def publish(folder: Path, step: int, write: Callable[[Path], None], keep_last: int, group: Group = ALONE) -> None:
    """Let `write` fill a temporary folder, add the manifest, flush to disk, rename into place, drop older checkpoints.

    Every process of `group` calls this and writes its own part. A UserError in any of them, or a disk that is full, ends
    the call in all of them with a UserError; the checkpoints that were there before remain.
    """
    work, failure = folder / f".writing-{step:08d}", None

    def begin() -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)

    # Main alone, all, all, main alone: nobody begins a stage before everybody has ended the one before.
    stages = (
        (begin, group.main),
        (lambda: write(work), True),
        (lambda: _write_digests(work, group), True),
        (lambda: _seal(folder, step, work, keep_last), group.main),
    )
    for stage, mine in stages:
        try:
            if mine:
                stage()
        except (OSError, SafetensorError, UserError) as error:
            failure = error
        if not group.all_well(failure is None):
            if group.main:
                shutil.rmtree(work, ignore_errors=True)
            raise _unwritten(folder, step, failure) from failure


def _unwritten(folder: Path, step: int, failure: Exception | None) -> UserError:
    if isinstance(failure, UserError):
        return failure
    why = "another process failed" if failure is None else getattr(failure, "strerror", None) or str(failure)
    older = f"{found(folder)[0].name} is still there" if found(folder) else "there is no earlier one"
    return UserError(
        f"{folder}: the checkpoint of step {step} could not be written: {why}; {older}. "
        "Make room or give another train.out, then run the same command again"
    )


def _write_digests(work: Path, group: Group) -> None:
    """The digests of this process's share of the files, for the main process to gather."""
    mine = group.share(sorted(path.name for path in work.iterdir() if not path.name.startswith(".digests-")))
    with ThreadPoolExecutor(THREADS) as pool:
        digests = dict(zip(mine, pool.map(lambda name: digest(work / name), mine), strict=True))
    text = json.dumps({name: found.model_dump() for name, found in digests.items()})
    (work / f".digests-{group.index}").write_text(text)


def _seal(folder: Path, step: int, work: Path, keep_last: int) -> None:
    """Write the manifest, flush everything, rename the folder to its step's name, drop what is no longer needed."""
    files: dict[str, Digest] = {}
    for part in sorted(work.glob(".digests-*")):
        files |= json.loads(part.read_text())
        part.unlink()
    manifest = Manifest.model_validate({"format": FORMAT, "step": step, "files": files})
    (work / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    for path in [*work.iterdir(), work]:
        sync(path)
    final = folder / f"step-{step:08d}"
    if final.exists():  # a step that is reached again, from an earlier one
        shutil.rmtree(final)
    os.rename(work, final)
    sync(folder)
    aside = [path for path in set_aside(folder) if step_of(path) <= step]
    for old in [*found(folder)[keep_last:], *folder.glob(".writing-*"), *aside]:
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> Digest:
    """Size and BLAKE2b-128 of a file, read in pieces."""
    found, size = blake2b(digest_size=16), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
            size += len(piece)
    return Digest(size=size, blake2b=found.hexdigest())


# --- finding ----------------------------------------------------------------------------------------------------------


def found(folder: Path) -> list[Path]:
    """Checkpoints by name, newest first; a folder that a crash left half written has another name."""
    return _named(folder, "")


def set_aside(folder: Path) -> list[Path]:
    """Damaged checkpoints that a run has passed over, newest first."""
    return _named(folder, ASIDE)


def _named(folder: Path, prefix: str) -> list[Path]:
    if not folder.is_dir():
        return []
    names = (path for path in folder.iterdir() if path.name.startswith(prefix))
    return sorted((path for path in names if NAME.fullmatch(path.name.removeprefix(prefix))), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written, by its name."""
    return int(checkpoint.name.rpartition("-")[2])


def newest_whole(folder: Path, say: Callable[[str], None], group: Group = ALONE) -> Path | None:
    """The newest checkpoint whose every file is as it was written; None in a folder without checkpoints.

    `say` gets a line for each damaged one. Those are then renamed, so that no later run takes them for checkpoints, and
    deleted once a newer one is written. If all are damaged, nothing is renamed, and that is a UserError.
    """
    damaged: list[tuple[Path, str]] = []
    for checkpoint in found(folder):
        mine = damage(checkpoint, group)
        if group.all_well(mine is None):
            for path, why in damaged:
                say(f"{path} is damaged ({why}): going on from {checkpoint.name}, the newest that is whole")
                if group.main:
                    _put_aside(path)
            return checkpoint
        damaged.append((checkpoint, mine or "another process found it"))
    if not damaged:
        return None
    reasons = "; ".join(f"{path.name}: {why}" for path, why in damaged)
    raise UserError(
        f"{folder}: no checkpoint is whole ({reasons}). Restore one from a copy, give another train.out, "
        "or set train.resume = false to begin again"
    )


def _put_aside(path: Path) -> None:
    target = path.with_name(ASIDE + path.name)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target, ignore_errors=True)
    with suppress(OSError):  # then it is found out again at the next start
        os.replace(path, target)


def damage(checkpoint: Path, group: Group = ALONE) -> str | None:
    """What is wrong with the first file of this process's share that is not as it was written; None if all are."""
    return next(_damages(checkpoint, group), None)


def _damages(checkpoint: Path, group: Group) -> Iterator[str]:
    if not checkpoint.is_dir():
        yield "not a folder"
        return
    try:
        manifest = Manifest.model_validate_json((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        earlier = (checkpoint / "custom_checkpoint_0.pkl").exists()
        yield (
            "written by an earlier version of dlm, in pickles, which are never read" if earlier else "no manifest.json"
        )
        return
    except OSError as error:
        yield f"manifest.json: {error.strerror}"
        return
    except ValidationError:
        yield "manifest.json is not what was written"
        return
    if manifest.format != FORMAT:
        yield f"format {manifest.format}: this version of dlm reads format {FORMAT}"
    elif manifest.step != step_of(checkpoint):
        yield f"its manifest.json is of step {manifest.step}"
    yield from differing(checkpoint, manifest.files, group)


def differing(folder: Path, files: dict[str, Digest], group: Group = ALONE) -> Iterator[str]:
    """What is wrong with each file of this process's share that is not as its digest says."""
    mine = group.share(sorted(files))
    with ThreadPoolExecutor(THREADS) as pool:
        problems = pool.map(lambda name: _difference(folder / name, files[name]), mine)
        yield from (name + problem for name, problem in zip(mine, problems, strict=True) if problem)


def _difference(path: Path, expected: Digest) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f" has {size:,} bytes instead of {expected.size:,}"
        return None if digest(path) == expected else " has other bytes than were written (BLAKE2b differs)"
    except FileNotFoundError:
        return " is missing"
    except OSError as error:
        return f": {error.strerror}"
