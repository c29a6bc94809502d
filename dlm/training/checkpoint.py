"""Writes checkpoint folders whole or not at all, with a digest of each file, and finds the newest undamaged one."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from dlm.atomic import sync
from dlm.errors import UserError
from dlm.training.digests import Digest, Name, differing, digests

NAME = re.compile(r"step-\d+")
MANIFEST = "manifest.json"
FORMAT = 2  # 1 was accelerate's own, whose files had to be unpickled
ASIDE = "damaged-"  # prefix of a damaged checkpoint's name


class Manifest(BaseModel, strict=True, extra="forbid"):
    """manifest.json, the last file to be written: what a whole checkpoint consists of."""

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


def publish(folder: Path, step: int, write: Callable[[Path], None], keep_last: int, group: Group = ALONE) -> None:
    """Let `write` fill a temporary folder, add the manifest, flush to disk, rename into place, drop older checkpoints.

    Every process of `group` calls this and writes its own part. A UserError in any of them, or a disk that is full, ends
    the call in all of them with a UserError; the checkpoints that were there before remain.
    """
    work, failure = folder / f".writing-{step:08d}", None

    def begin() -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)

    # (work, whether this process does it); a stage begins when all processes have finished the one before.
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
    text = json.dumps({name: found.model_dump() for name, found in digests(work, mine).items()})
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
    if final.exists():  # the run went back to an earlier step, and has reached this one again
        shutil.rmtree(final)
    os.rename(work, final)
    sync(folder)
    aside = [path for path in found(folder, ASIDE) if step_of(path) <= step]
    for old in [*found(folder)[keep_last:], *folder.glob(".writing-*"), *aside]:
        shutil.rmtree(old, ignore_errors=True)


def found(folder: Path, prefix: str = "") -> list[Path]:
    """The checkpoints in a folder, newest first; with the prefix ASIDE the damaged ones that were set aside."""
    paths = folder.iterdir() if folder.is_dir() else ()
    named = (p for p in paths if p.name.startswith(prefix) and NAME.fullmatch(p.name.removeprefix(prefix)))
    return sorted(named, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
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
    with suppress(OSError):  # if it cannot be renamed, the next start finds the damage again
        os.replace(path, target)


def damage(checkpoint: Path, group: Group = ALONE) -> str | None:
    """What is wrong with the first file of this process's share that is not as it was written; None if all are."""
    return next(_damages(checkpoint, group), None)


def _damages(checkpoint: Path, group: Group) -> Iterator[str]:
    manifest = _manifest(checkpoint)
    if isinstance(manifest, str):
        yield manifest
        return
    if manifest.format != FORMAT:
        yield f"format {manifest.format}: this version of dlm reads format {FORMAT}"
    elif manifest.step != step_of(checkpoint):
        yield f"its manifest.json is of step {manifest.step}"
    yield from differing(checkpoint, {name: manifest.files[name] for name in group.share(sorted(manifest.files))})


def _manifest(checkpoint: Path) -> Manifest | str:
    """The manifest, or what is wrong with it."""
    if not checkpoint.is_dir():
        return "not a folder"
    try:
        return Manifest.model_validate_json((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        pickled = (checkpoint / "custom_checkpoint_0.pkl").exists()
        old = "written by an earlier version of dlm, in pickles, which are never read"
        return old if pickled else "no manifest.json"
    except OSError as error:
        return f"manifest.json: {error.strerror}"
    except ValidationError:
        return "manifest.json is not what was written"
