"""Files on this machine: text and JSON lines, as rows. Knows nothing of tokens; errors name the file and the line."""

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlm.data.config import DataConfig
from dlm.data.corpus import is_held_out
from dlm.data.documents import Row
from dlm.errors import UserError

PATTERNS = {"text": ("*.txt", "*.md", "*.py"), "jsonl": ("*.jsonl", "*.json"), "chat": ("*.jsonl", "*.json")}


def find_files(paths: tuple[str, ...], patterns: tuple[str, ...], field: str) -> list[Path]:
    """Files, globs and folders as files: each once, in the order of the config, sorted inside a glob or folder."""
    found: dict[Path, None] = {}
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_dir():
            matches = sorted({p for pattern in patterns for p in path.rglob(pattern) if p.is_file()})
        elif path.is_file():
            matches = [path]
        else:
            matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not matches:
            looked = f"no {' or '.join(patterns)} file in this folder" if path.is_dir() else "no such file"
            raise UserError(f'data.{field}: "{entry}": {looked} (looked from {Path.cwd()})')
        found.update(dict.fromkeys(matches))
    return list(found)


def split_paths(config: DataConfig, split: str) -> tuple[tuple[str, ...], str]:
    """The config's paths for a split, and the field they stand in."""
    if split == "heldout" and config.heldout_paths:
        return config.heldout_paths, "heldout_paths"
    return config.paths, "paths"


def in_split(key: str, config: DataConfig, split: str) -> bool:
    """Whether a document belongs to the split, by its hash unless held-out files are named."""
    if config.heldout_paths or config.heldout_split:
        return True
    return is_held_out(key, config.heldout_fraction) == (split == "heldout")


def text_rows(config: DataConfig, split: str) -> Iterator[Row]:
    """Documents of text files: whole files, paragraphs or lines, split by a hash of their content."""
    paths, field = split_paths(config, split)
    for path in find_files(paths, PATTERNS["text"], field):
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            line = path.read_bytes()[: error.start].count(b"\n") + 1
            raise UserError(
                f"{path}:{line}: not UTF-8 ({error.reason}); convert the file, or leave it out of data.{field}"
            ) from error
        for number, part in _parts(text, config.document):
            if part.strip() and in_split(part, config, split):
                yield Row({"text": part}, part, f"{path}:{number}")


def _parts(text: str, document: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of each document."""
    if document == "file":
        yield 1, text
        return
    held: list[str] = []
    first = 1
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if document == "line":
            yield number, line
        elif line.strip():
            first = first if held else number
            held.append(line)
        elif held:
            yield first, "\n".join(held)
            held = []


def json_rows(config: DataConfig, split: str) -> Iterator[Row]:
    """Objects of JSON-lines files, one a line, split by a hash of the line."""
    paths, field = split_paths(config, split)
    for path in find_files(paths, PATTERNS["jsonl"], field):
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                value = _parse(raw, f"{path}:{number}")
                key = json.dumps(value, sort_keys=True)
                if in_split(key, config, split):
                    yield Row(value, key, f"{path}:{number}")


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); JSON lines hold one object a line") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: {str(value)[:40]!r} is a {type(value).__name__}, not a JSON object")
    return value
