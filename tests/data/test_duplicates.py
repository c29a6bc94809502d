"""Copies of held-out files are found however they were changed; other files are left alone."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlm.data import corpus
from dlm.data.config import DataConfig
from dlm.data.duplicates import LeakGuard, Repeats, shingles, telling_lines
from dlm.errors import UserError


@dataclass(frozen=True)
class File:
    text: str


def written(seed: int, lines: int = 40) -> File:
    draw = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "count", "total", "value", "index", "name", "result", "other", "size"]
    return File("\n".join(
        f"    {draw.choice(words)}_{draw.randrange(99)} = {draw.choice(words)}({draw.choice(words)}, {draw.randrange(99)})"
        for _ in range(lines)
    ))  # fmt: skip


HELD = [written(1), written(2)]


def brute(one: File, other: File, size: int = 8) -> float:
    """Shared runs of tokens over those of the smaller file."""
    runs = []
    for file in (one, other):
        tokens = re.findall(r"\w+|[^\w\s]", file.text)
        runs.append({tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)})
    return len(runs[0] & runs[1]) / min(map(len, runs))


def test_a_stranger_does_not_leak():
    guard = LeakGuard(HELD)
    assert not any(guard.leaks(written(seed)) for seed in range(10, 30))
    assert not guard.leaks(File(""))


@pytest.mark.parametrize("blanks", ["\n\n", "\n        ", "\n# a comment of some length, which says nothing\n"])
def test_other_blanks_and_comments_do_not_hide_a_copy(blanks):
    assert LeakGuard(HELD).leaks(File(HELD[0].text.replace("\n", blanks)))


def test_a_third_of_a_held_out_file_inside_a_long_one_leaks():
    guard = LeakGuard(HELD)
    part = "\n".join(HELD[1].text.splitlines()[:16])
    assert guard.leaks(File(written(77, 400).text + "\n" + part))
    few = "\n".join(HELD[1].text.splitlines()[:4])
    assert not guard.leaks(File(written(77, 400).text + "\n" + few))


def test_rewrapped_lines_are_found_by_their_shingles():
    lines = HELD[0].text.splitlines()
    wrapped = [line if number % 5 == 0 else line.replace("(", "(\n        ") for number, line in enumerate(lines)]
    copy = File("\n".join(wrapped))
    assert 2 * len(telling_lines(copy) & telling_lines(HELD[0])) < len(telling_lines(HELD[0]))
    assert LeakGuard(HELD).leaks(copy)


def test_likeness_is_the_share_of_common_runs():
    guard = LeakGuard(HELD)
    mixed = File("\n".join(HELD[0].text.splitlines()[:9] + written(5).text.splitlines()))
    assert guard.likeness(mixed) == pytest.approx(brute(mixed, HELD[0])) and 0 < guard.likeness(mixed) < 1
    assert guard.likeness(HELD[1]) == 1.0 and guard.likeness(written(9)) == 0.0
    assert len(shingles(HELD[0])) > 100


def test_what_was_said_before_is_not_fresh():
    repeats = Repeats()
    assert repeats.fresh(HELD[0]) == 1.0
    repeats.add(HELD[0])
    assert repeats.fresh(HELD[0]) == 0.0 and repeats.fresh(written(8)) == 1.0
    half = File("\n".join(HELD[0].text.splitlines()[:20] + written(3).text.splitlines()[:20]))
    assert 0.4 < repeats.fresh(half) < 0.6
    assert repeats.fresh(File("x = 1\n")) == 1.0


def test_packages_come_from_the_folder_named_and_only_with_something_new(tmp_path: Path):
    def lines(first: int, last: int) -> str:
        return "".join(f"some_variable_{n} = a_function_of({n})\n" for n in range(first, last))

    library, site = tmp_path / "library", tmp_path / "elsewhere"
    files = {
        "a/one.py": lines(0, 40),
        "b/half.py": lines(20, 60),
        "c/most.py": lines(10, 45),
        "d/new.py": lines(70, 90),
    }
    for folder, texts in ((library, {f"module_{n}.py": f"x = {n}\n" for n in range(9)}), (site, files)):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def found(**changes: object) -> list[str]:
        given = {"site_packages": True, "site_packages_path": str(site), "site_packages_fresh": 0.5, **changes}
        paths = [f.path for f in corpus.split_files(DataConfig(**given), "train", library)]
        return [path.removeprefix("site-packages/") for path in paths if path.startswith("site-packages/")]

    assert found() == ["a/one.py", "b/half.py", "d/new.py"]
    assert found(site_packages_fresh=0.0) == list(files)
    assert found(site_packages_fresh=0.6) == ["a/one.py", "d/new.py"]
    with pytest.raises(UserError, match="site_packages_path = 'nowhere' is not a folder"):
        found(site_packages_path="nowhere")
