"""Damaged checkpoints: a run goes on from the newest whole one and says so, or is refused; never with other numbers.

`python -m tests.training.test_damage` prints what each damage leads to.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlm.errors import UserError
from dlm.training import checkpoint, report
from dlm.training.config import TrainConfig
from dlm.training.digests import digests
from dlm.training.loop import train
from tests.training.runs import config, rows

STEPS, SAVED = 5, (2, 4)
FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json", "config.json")
Damage = Callable[[Path, Path], object]  # of the newest checkpoint and the one before


def flip(file: Path, at: float, bit: int = 4) -> None:
    """One bit of the byte at this share of the file."""
    data = bytearray(file.read_bytes())
    data[min(int(at * len(data)), len(data) - 1)] ^= 1 << bit
    file.write_bytes(data)


def cut(file: Path, share: float) -> None:
    os.truncate(file, int(file.stat().st_size * share))


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def into_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def into_loop(file: Path) -> None:
    """A link that nobody can follow, as good as a file that nobody may read."""
    file.unlink()
    file.symlink_to(file.name)


def edited(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


OF_A_FILE: dict[str, Callable[[Path, Path], object]] = {
    "cut in half": lambda file, _: cut(file, 0.5),
    "last byte cut": lambda file, _: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file, _: cut(file, 0),
    "one bit flipped": lambda file, _: flip(file, 0.7),
    "removed": lambda file, _: file.unlink(),
    "the older one's instead": lambda file, older: shutil.copy(older / file.name, file),
    "garbage of the same size": lambda file, _: file.write_bytes(b"\x93" * file.stat().st_size),
    "a folder instead": lambda file, _: into_folder(file),
    "unreadable": lambda file, _: into_loop(file),
}


FEW = ("cut in half", "one bit flipped", "removed", "unreadable")  # of the two files that are the least interesting


def of_file(name: str, act: Callable[[Path, Path], object]) -> Damage:
    return lambda newest, older: act(newest / name, older)


PASSED_OVER: dict[str, Damage] = {
    f"{name}: {what}": of_file(name, act)
    for name in FILES
    for what, act in OF_A_FILE.items()
    if name not in FILES[4:] or what in FEW
}
PASSED_OVER |= {
    "model: the first bit flipped": lambda new, old: flip(new / FILES[1], 0, 0),
    "model: the last bit flipped": lambda new, old: flip(new / FILES[1], 1, 7),
    "optimizer: the first bit flipped": lambda new, old: flip(new / FILES[2], 0, 0),
    "optimizer: the last bit flipped": lambda new, old: flip(new / FILES[2], 1, 7),
    "model and optimizer swapped": lambda new, old: swap(new / FILES[1], new / FILES[2]),
    "JSON of something else": lambda new, old: (new / FILES[0]).write_text('[{"step": 4}]'),
    "manifest of a later format": lambda new, old: edited(new / FILES[0], format=99),
    "manifest without files' digests": lambda new, old: edited(new / FILES[0], files={"state.json": 7}),
    "manifest that leads elsewhere": lambda new, old: edited(new / FILES[0], files={"../../x": {"size": 1, "blake2b": ""}}),
    "an empty folder": lambda new, old: (shutil.rmtree(new), new.mkdir()),
    "a file of its name": lambda new, old: (shutil.rmtree(new), new.write_bytes(b"step")),
    "a link to nowhere": lambda new, old: (shutil.rmtree(new), new.symlink_to("nowhere")),
    "renamed to a later step": lambda new, old: new.rename(new.with_name("step-00000005")),
    "renamed to an impossible step": lambda new, old: new.rename(new.with_name("step-" + "9" * 30)),
    "the older one under its name": lambda new, old: (shutil.rmtree(new), shutil.copytree(old, new)),
    "the older one a second time, as a later step": lambda new, old: (
        shutil.rmtree(new),
        shutil.copytree(old, new.with_name("step-00000006")),
    ),
    "accelerate's files instead": lambda new, old: (
        shutil.rmtree(new),
        new.mkdir(),
        *((new / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.") for name in ("custom_checkpoint_0.pkl", "optimizer.bin")),
    ),
}  # fmt: skip
WITHOUT_EFFECT: dict[str, Damage] = {
    "the older one damaged": lambda new, old: flip(old / FILES[1], 0.5),
    "a file beside the others": lambda new, old: (new / "custom_checkpoint_0.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR."),
    "a torn one of a later step": lambda new, old: shutil.copytree(new, new.with_name(".writing-00000006")),
    "a copy under another name": lambda new, old: shutil.copytree(new, new.with_name("step-00000004 (copy)")),
}  # fmt: skip
REFUSED: dict[str, Damage] = {
    "both cut": lambda new, old: (cut(new / FILES[1], 0.9), cut(old / FILES[2], 0.9)),
    "both without a manifest": lambda new, old: ((new / FILES[0]).unlink(), (old / FILES[0]).unlink()),
    "the two swapped": lambda new, old: (new.rename(new.with_name("x")), old.rename(new), new.with_name("x").rename(old)),
    "of another run": lambda new, old: [
        (edited(c / "config.json", train={}), _signed(c)) for c in (new, old)
    ],
}  # fmt: skip


def _signed(folder: Path) -> None:
    """A manifest that fits, as of a run with another config."""
    edited(folder / FILES[0], files={name: found.model_dump() for name, found in digests(folder, FILES[1:]).items()})


class Stopped:
    """A run that was stopped after its second checkpoint, and the run that never was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.straight = train(self.config("straight"))
        whole = folder / "straight"
        shutil.copytree(whole / "checkpoints", folder / "stopped" / "checkpoints")
        shutil.rmtree(folder / "stopped" / "checkpoints" / f"step-{STEPS:08d}")
        lines = [
            line for line in (whole / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= SAVED[1]
        ]
        (folder / "stopped" / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
        self.weights = load_file(whole / "model.safetensors")

    def config(self, out: str, **more: str) -> TrainConfig:
        saved = {"checkpoint__every": "2", "checkpoint__keep_last": "3"} | more
        return config(self.folder, out, train__steps=str(STEPS), train__ema="0.9", eval__sequences="0", **saved)

    def go_on(self, damage: Damage) -> tuple[int | None, str]:
        """The step resumed from, or None where that is refused; and what was said."""
        out = self.folder / "damaged"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.folder / "stopped", out)
        for name in (".lock", "finished.json"):
            (out / name).unlink(missing_ok=True)
        older, newest = (out / "checkpoints" / f"step-{step:08d}" for step in SAVED)
        damage(newest, older)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                found = train(self.config("damaged"))
        except UserError as error:
            return None, said.getvalue() + str(error)
        start = STEPS - len(found.losses)
        assert found.losses == self.straight.losses[start:]
        assert [r["step"] for r in rows(out)] == list(range(1, STEPS + 1))
        weights = load_file(out / "model.safetensors")
        assert all(torch.equal(weights[name], self.weights[name]) for name in self.weights)
        return start, said.getvalue()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "gemm_ceiling", lambda *_: 1e12)  # half of the time that so small a run takes
        yield Stopped(tmp_path_factory.mktemp("stopped"))


@pytest.mark.parametrize("what", PASSED_OVER)
def test_a_damaged_checkpoint_is_passed_over_with_a_word(stopped, what):
    start, said = stopped.go_on(PASSED_OVER[what])
    assert start == SAVED[0] and "is damaged (" in said and "going on from step-00000002" in said
    assert f"resuming from step {SAVED[0]} of" in said and len(said.splitlines()) == 2


@pytest.mark.parametrize("what", WITHOUT_EFFECT)
def test_what_is_no_part_of_the_newest_checkpoint_has_no_effect(stopped, what):
    start, said = stopped.go_on(WITHOUT_EFFECT[what])
    assert start == SAVED[1] and said.splitlines() == [f"resuming from step {SAVED[1]} of {stopped.folder / 'damaged'}"]


@pytest.mark.parametrize("what", REFUSED)
def test_without_a_whole_checkpoint_a_run_is_refused(stopped, what):
    start, said = stopped.go_on(REFUSED[what])
    assert start is None and "train.resume = false" in said and "another train.out" in said
    assert len(checkpoint.found(stopped.folder / "damaged" / "checkpoints")) == 2  # both are still there


@pytest.mark.parametrize("keep", ["1", "2"])
def test_a_damaged_checkpoint_is_set_aside_until_a_newer_one_is_written(stopped, keep):
    folder = stopped.folder / "aside"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(stopped.folder / "stopped", folder, dirs_exist_ok=True)
    flip(folder / "checkpoints" / "step-00000004" / FILES[1], 0.5)
    seen, step = [], checkpoint.sync

    def sync(path: Path) -> None:  # the last call of a checkpoint's writing is for the folder of all of them
        step(path)
        if path == folder / "checkpoints":
            seen.append(sorted(p.name for p in path.iterdir()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "sync", sync)
        train(stopped.config("aside", checkpoint__every="1", checkpoint__keep_last=keep))
    assert seen[0] == ["damaged-step-00000004", "step-00000002", "step-00000003"]
    # Step 4 is reached again: the damaged one goes after the new one has come.
    assert seen[1][0] == "damaged-step-00000004" and "step-00000004" in seen[1]
    assert not any(name.startswith("damaged") for name in seen[2])
    kept = [p.name for p in checkpoint.found(folder / "checkpoints")]
    assert kept == ["step-00000005", "step-00000004"][: int(keep)]


def summary(folder: Path) -> str:
    stopped, lines, counts = Stopped(folder), [], {"passed over": 0, "no effect": 0, "refused": 0}
    for kind, damages in zip(counts, (PASSED_OVER, WITHOUT_EFFECT, REFUSED), strict=True):
        for what, damage in damages.items():
            start, said = stopped.go_on(damage)
            counts[kind] += 1
            end = "refused" if start is None else f"resumed from step {start}, same numbers"
            lines.append(f"| {what} | {end} | {said.splitlines()[0].replace(str(folder), '…')} |")
    head = f"{sum(counts.values())} damages: " + ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return "\n".join((head, "", "| damage | outcome | first line |", "|---|---|---|", *lines))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(summary(Path(name)) + "\n")
