"""Local text and JSON-lines files as rows. Errors name the file and the line."""

import glob
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from dlm.data.config import DataConfig
from dlm.data.documents import Row, content
from dlm.data.split import Split, cut
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


def text_rows(config: DataConfig, split: str) -> Iterator[Row]:
    """Documents of text files: whole files, paragraphs or lines, split by a hash of their content.

    Where there are so few files that one is more than `data.heldout_fraction` of them, pieces of files are held out.
    """
    side = Split.of(config, ((row.key, row.key) for row in _texts(config, split)))
    documents = side.documents
    if documents == 1 or (documents and config.document == "file" and documents * config.heldout_fraction < 1):
        yield from _cut_rows(config, split)
        return
    yield from (row for row in _texts(config, split) if side.takes(row.key, row.key, split))


def _cut_rows(config: DataConfig, split: str) -> Iterator[Row]:
    """Pieces of the documents; neighbouring pieces of the same split are joined again."""
    documents = list(_texts(config, split))
    pieces = list(cut(row.key for row in documents))
    side = Split.of(config, ((p.strip(), p.strip()) for each in pieces for p in each if p.strip()))
    for row, parts in zip(documents, pieces, strict=True):
        path, _, first = row.where.rpartition(":")
        line = int(first)
        for taken, run in groupby(parts, key=lambda part: side.takes(part.strip(), part.strip(), split)):
            text = "".join(run)
            if taken and text.strip():
                yield Row({"text": text}, text, f"{path}:{line}")
            line += text.count("\n")


def _texts(config: DataConfig, split: str) -> Iterator[Row]:
    """Every document that is not blank, of both splits."""
    paths, field = split_paths(config, split)
    for path in find_files(paths, PATTERNS["text"], field):
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            line = path.read_bytes()[: error.start].count(b"\n") + 1
            raise UserError(f"{path}:{line}: not UTF-8 ({error.reason}); convert it, or change data.{field}") from error
        parts = ((number, part) for number, part in _parts(text, config.document) if part.strip())
        yield from (Row({"text": part}, part, f"{path}:{number}") for number, part in parts)


def _parts(text: str, document: str) -> Iterator[tuple[int, str]]:
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
    side = Split.of(config, ((row.key, content(row, config)) for row in _objects(config, split)))
    yield from (row for row in _objects(config, split) if side.takes(row.key, content(row, config), split))


def _objects(config: DataConfig, split: str) -> Iterator[Row]:
    """Every line, of both splits."""
    paths, field = split_paths(config, split)
    for path in find_files(paths, PATTERNS["jsonl"], field):
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    value = _parse(raw, f"{path}:{number}")
                    yield Row(value, json.dumps(value, sort_keys=True), f"{path}:{number}")


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
