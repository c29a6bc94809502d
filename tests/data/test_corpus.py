"""The standard library as a corpus: what is read, how it is split, and that nothing held out leaks back."""

from pathlib import Path

import pytest

from dlm.data import corpus
from dlm.data.config import DataConfig
from dlm.errors import UserError

HASH_OF_LOGGING = 0.01942845751046896
BODY = "\n".join(f"def some_function_number_{i}(argument, other): return argument + {i}" for i in range(30)) + "\n"


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


@pytest.fixture
def library(tmp_path: Path) -> Path:
    named = {f"module_{i}.py": f"# {i}\n" + BODY.replace("some", f"m{i}") for i in range(60)}
    skipped: dict[str, str | bytes] = {
        "site-packages/x.py": "x = 1",
        "pydoc_data/topics.py": "x = 2",
        "encodings/cp1.py": "def getregentry(): ...",
        "_sysconfigdata_here.py": "build_time_vars = {}",
        "latin.py": b"x = '\xe9'",
        "empty.py": "\n",
        "email/test/test_email.py": "x = 3",
    }
    return write(tmp_path / "lib", named | skipped | {"email/parser.py": "x = 4"})


def test_reads_sources_in_order_without_tables_and_tests(library: Path) -> None:
    paths = [f.path for f in corpus.stdlib_files(DataConfig(), library)]
    assert paths == sorted([f"module_{i}.py" for i in range(60)] + ["email/parser.py"])
    with_tests = [f.path for f in corpus.stdlib_files(DataConfig(include_tests=True), library)]
    assert set(with_tests) - set(paths) == {"email/test/test_email.py"}


def test_the_hash_never_changes() -> None:
    # Bundled models were trained on this split: a different hash would put their held-out files into training.
    assert corpus.hash_fraction("logging/__init__.py", corpus.SALT) == pytest.approx(HASH_OF_LOGGING, abs=1e-12)
    assert corpus.is_held_out("logging/__init__.py", 0.02)
    assert not corpus.is_held_out("json/decoder.py", 0.02)


def test_splits_are_disjoint_whole_and_grow_with_the_fraction(library: Path) -> None:
    small, large = DataConfig(heldout_fraction=0.1), DataConfig(heldout_fraction=0.3)
    paths = {s: {f.path for f in corpus.split_files(small, s, library)} for s in ("train", "heldout")}
    assert not paths["train"] & paths["heldout"]
    assert paths["train"] | paths["heldout"] == {f.path for f in corpus.stdlib_files(small, library)}
    assert 0 < len(paths["heldout"]) < 20
    assert paths["heldout"] <= {f.path for f in corpus.split_files(large, "heldout", library)}


def test_site_packages_never_hold_a_held_out_file(library: Path, tmp_path: Path) -> None:
    config = DataConfig(heldout_fraction=0.3, site_packages=True, site_packages_max_bytes=9000)
    held = corpus.split_files(config, "heldout", library)[-1]
    assert held.path.startswith("module_")
    site = write(
        tmp_path / "site",
        {
            "vendor/copy.py": held.text,
            "vendor/crlf.py": held.text.replace("\n", "\r\n"),
            "vendor/indented.py": "if True:\n" + "".join(f"    {line}\n" for line in held.text.splitlines()),
            "vendor/edited.py": held.text.replace("number_1", "no_1"),
            "vendor/embedded.py": BODY + held.text,
            "own/new.py": "a = 'nothing in common with the library'\n",
            "own/twin.py": "a = 'nothing in common with the library'\n",
            "own/large.py": "b = 1\n" * 5000,
            "other/mine.py": "c = 1\n",
        },
    )
    found = {f.path for f in corpus.split_files(config, "train", library, site) if f.path.startswith("site-packages/")}
    assert found == {"site-packages/own/new.py", "site-packages/other/mine.py"}
    only = config.model_copy(update={"site_packages_only": ("other",)})
    assert [f.path for f in corpus.split_files(only, "train", library, site)][-1] == "site-packages/other/mine.py"
    without = config.model_copy(update={"site_packages_skip": ("own", "other", "vendor")})
    assert not any("site-packages" in f.path for f in corpus.split_files(without, "train", library, site))
    assert not any("site-packages" in f.path for f in corpus.split_files(config, "heldout", library, site))


def test_packages_come_from_the_folder_named_and_only_with_something_new(library: Path, tmp_path: Path) -> None:
    def lines(first: int, last: int) -> str:
        return "".join(f"some_variable_{n} = a_function_of({n})\n" for n in range(first, last))

    files = {
        "a/one.py": lines(0, 40),
        "b/half.py": lines(20, 60),
        "c/most.py": lines(10, 45),
        "d/new.py": lines(70, 90),
    }
    site = write(tmp_path / "elsewhere", files)
    config = DataConfig(site_packages=True, site_packages_path=str(site), site_packages_fresh=0.5)

    def found(config: DataConfig) -> list[str]:
        paths = [f.path for f in corpus.split_files(config, "train", library)]
        return [path.removeprefix("site-packages/") for path in paths if path.startswith("site-packages/")]

    assert found(config) == ["a/one.py", "b/half.py", "d/new.py"]
    assert found(config.model_copy(update={"site_packages_fresh": 0.0})) == list(files)
    assert found(config.model_copy(update={"site_packages_fresh": 0.6})) == ["a/one.py", "d/new.py"]
    with pytest.raises(UserError, match="site_packages_path = 'nowhere' is not a folder"):
        found(config.model_copy(update={"site_packages_path": "nowhere"}))


def test_repeat_counts_training_files_only(library: Path) -> None:
    once, twice = DataConfig(), DataConfig(stdlib_repeat=2)
    assert corpus.split_files(twice, "train", library) == corpus.split_files(once, "train", library) * 2
    assert corpus.split_files(twice, "heldout", library) == corpus.split_files(once, "heldout", library)


def test_a_python_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="source = text"):
        corpus.stdlib_files(DataConfig(), tmp_path)
    with pytest.raises(UserError, match="missing"):
        corpus.stdlib_files(DataConfig(), tmp_path / "nowhere")
