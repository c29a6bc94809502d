"""The corpus that needs no download: the running Python's own library sources."""

import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from dlm.data.config import DataConfig
from dlm.data.duplicates import LeakGuard, Repeats, content_of
from dlm.errors import UserError

TEST_FOLDERS = {"test", "tests", "idle_test"}
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "pydoc_data",
    "__pycache__",
    "_bundled",
    "turtledemo",
    "__phello__",
}
# Decides which files are held out. With this value they are a mixed 2 %: parsers, text codecs, logging, small modules.
SALT = "heldout6"


@dataclass(frozen=True)
class SourceFile:
    """One Python file: where it lies relative to its root, and its text."""

    path: str
    text: str


def hash_fraction(text: str, salt: str = "") -> float:
    """A stable number in [0, 1) for a string, the same on every machine and in every process."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, salt=salt.encode()[:16]).digest()
    return int.from_bytes(digest, "big") / 2**64


def is_held_out(key: str, fraction: float) -> bool:
    """Whether the document named `key` belongs to the held-out split."""
    return hash_fraction(key, SALT) < fraction


def stdlib_files(config: DataConfig, root: Path | None = None) -> list[SourceFile]:
    """The standard library's files by path, without generated ones and, unless `include_tests`, without tests."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise UserError(f"the standard library at {root} is missing: this Python ships no sources; use source = text")
    files = [f for f in _python_files(root, tests=config.include_tests) if not _is_generated(f)]
    if not files:
        raise UserError(f"no Python source under {root}: this Python ships compiled files only; use source = text")
    return files


def _python_files(root: Path, tests: bool, max_bytes: int | None = None) -> Iterator[SourceFile]:
    skipped = SKIPPED_FOLDERS if tests else SKIPPED_FOLDERS | TEST_FOLDERS
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if skipped.intersection(relative.parts[:-1]) or not path.is_file():
            continue
        if max_bytes is not None and path.stat().st_size > max_bytes:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, PermissionError):
            continue
        if text.strip():
            yield SourceFile(relative.as_posix(), text.replace("\r\n", "\n"))


def _is_generated(file: SourceFile) -> bool:
    """Whether a file was generated: codec tables, their registration stubs, the variables of the build."""
    name = file.path.rsplit("/", 1)[-1]
    if file.path.startswith("encodings/"):
        return "def getregentry" in file.text
    return name.startswith("_sysconfigdata")


def split_files(config: DataConfig, split: str, root: Path | None = None, site: Path | None = None) -> list[SourceFile]:
    """The files of one split; no training file copies a held-out one."""
    files = stdlib_files(config, root)
    held = [f for f in files if is_held_out(f.path, config.heldout_fraction)]
    if split == "heldout":
        return held
    names = {f.path for f in held}
    guard = LeakGuard(held)
    train = [f for f in files if f.path not in names and not guard.leaks(f)]
    packages = site_package_files(config, guard, train, site) if config.site_packages else []
    return train * config.stdlib_repeat + packages


def site_package_files(
    config: DataConfig, guard: LeakGuard, already: list[SourceFile], site: Path | None = None
) -> list[SourceFile]:
    """Installed packages' sources: capped in size, each content once, nothing held out."""
    named = config.site_packages_path
    site = site or Path(named or sysconfig.get_paths()["purelib"]).expanduser()
    if not site.is_dir():
        fix = "give a folder of packages" if named else "set data.site_packages = false"
        where = f"data.site_packages_path = {named!r}" if named else f"site_packages = true, but {site}"
        raise UserError(f"{where} is not a folder: {fix}")
    seen, repeats = {content_of(f) for f in already}, Repeats()
    for file in already if config.site_packages_fresh else ():
        repeats.add(file)
    kept = []
    for file in _python_files(site, tests=config.include_tests, max_bytes=config.site_packages_max_bytes):
        package = file.path.split("/", 1)[0].removesuffix(".py")
        if package in config.site_packages_skip or package not in (config.site_packages_only or (package,)):
            continue
        if hash_fraction(file.path, "site") >= config.site_packages_fraction:
            continue
        content = content_of(file)
        if content in seen or guard.leaks(file):
            continue
        seen.add(content)
        if config.site_packages_fresh:
            if repeats.fresh(file) < config.site_packages_fresh:
                continue
            repeats.add(file)
        kept.append(SourceFile(f"site-packages/{file.path}", file.text))
    return kept


def describe(config: DataConfig) -> dict[str, object]:
    """What a model card says of the corpus: Python's version, files and bytes of each split."""
    splits = {name: split_files(config, name) for name in ("train", "heldout")}
    return {
        "corpus": "Python standard library" + (" and installed packages" if config.site_packages else ""),
        "python": platform.python_version(),
        "include_tests": config.include_tests,
        "heldout_fraction": config.heldout_fraction,
        **{f"{name}_files": len(files) for name, files in splits.items()},
        **{f"{name}_bytes": sum(len(f.text.encode()) for f in files) for name, files in splits.items()},
        "heldout_paths": [f.path for f in splits["heldout"]],
    }
