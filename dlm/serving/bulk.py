"""A file of prompts to a folder of answers, part by part: what was written is never written again. Knows no cluster.

A part holds the answers of so many consecutive rows, in their order, and appears whole or not at all. A job that was stopped
goes on with the parts that are missing. A row's seed follows from its id, so texts depend on no part and no actor.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError
from dlm.serving.batch_config import BatchConfig

if TYPE_CHECKING:
    from dlm.inference.engine import Engine

KEYS = ("id", "prompt", "messages", "seed", "sampler")
JOB = "job.json"


@dataclass(frozen=True)
class Part:
    """Consecutive rows, and the name of the file their answers go to."""

    name: str
    rows: list[dict[str, Any]]


Do = Callable[[BatchConfig, Sequence[Part]], Iterator[int]]
"""Writes parts, and yields the rows of each as it is done."""


class Folder:
    """Where answers go: a local folder or any URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self.system, self.path = fsspec.core.url_to_fs(url)
            self.system.makedirs(self.path, exist_ok=True)
        except (OSError, ValueError, ImportError) as error:
            raise UserError(f"--output {url}: cannot be used as a folder: {error}") from None
        self.url = url

    def names(self) -> set[str]:
        """The files in it."""
        return {PurePosixPath(name).name for name in self.system.ls(self.path, detail=False)}

    def read(self, name: str) -> str:
        """A file's text."""
        return self.system.cat_file(f"{self.path}/{name}").decode()

    def write(self, name: str, text: str) -> None:
        """A file, whole or not at all: what is half written has another name."""
        place = f"{self.path}/{name}"
        self.system.pipe_file(f"{place}.partial", text.encode())
        self.system.mv(f"{place}.partial", place)


def rows_of(url: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL or Parquet file: a prompt each, or an object with KEYS."""
    import fsspec

    try:
        with fsspec.open(url, "rb") as file:
            if url.endswith(".parquet"):
                import pyarrow.parquet

                for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1024):
                    yield from ({k: v for k, v in row.items() if v is not None} for row in batch.to_pylist())
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(line, f"{url} line {number}")
    except (OSError, ImportError) as error:
        raise UserError(f"--input {url}: cannot be read: {error}") from None


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    row = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(row, dict):
        raise UserError(f'{where}: expected a string or an object such as {{"prompt": "…"}}, not {str(row)[:40]}')
    return row


def parts_of(config: BatchConfig) -> list[Part]:
    """The rows, checked, numbered and cut. Raises UserError for a row that is none, and for two with one id."""
    section, seen, found = config.batch, set(), []
    rows = iter(rows_of(str(section.input)))
    number = 0
    while part := list(islice(rows, section.rows_per_part)):
        for row in part:
            row.setdefault("id", number)
            where, number = f"{section.input} row {number}", number + 1
            unknown = [key for key in row if key not in KEYS]
            if unknown:
                raise UserError(f'{where}: unknown key "{unknown[0]}": a row has {", ".join(KEYS)}')
            if ("prompt" in row) == ("messages" in row):
                raise UserError(f"{where}: give it either prompt or messages")
            if str(row["id"]) in seen:
                raise UserError(f"{where}: id {row['id']!r} is that of an earlier row: give each its own")
            seen.add(str(row["id"]))
        found.append(Part(f"part-{len(found):06d}.jsonl", part))
    if not found:
        raise UserError(f"--input {section.input} holds no row")
    return found


def missing(config: BatchConfig, folder: Folder) -> list[Part]:
    """The parts that are still to be written. Raises UserError where the folder is that of another job."""
    parts, present = parts_of(config), folder.names()
    job = json.dumps({**_identity(config), "rows": sum(len(part.rows) for part in parts)}, sort_keys=True, indent=1)
    if JOB not in present:
        if any(name.startswith("part-") for name in present):
            raise UserError(f"--output {folder.url} has parts of a job that it does not name: choose another folder")
        folder.write(JOB, job)
    elif (before := folder.read(JOB)) != job:
        old, new = json.loads(before), json.loads(job)
        name = next(key for key in {**old, **new} if old.get(key) != new.get(key))
        raise UserError(
            f"--output {folder.url} is that of another job ({name} was {json.dumps(old.get(name))[:120]}): choose another "
            "folder, or the same settings to go on"
        )
    return [part for part in parts if part.name not in present]


def _identity(config: BatchConfig) -> dict[str, Any]:
    """What decides the texts."""
    return {
        "input": str(config.batch.input),
        "rows_per_part": config.batch.rows_per_part,
        "seed": config.batch.seed,
        "model": config.model.model_dump(mode="json", exclude={"device"}),
        "sampler": config.sampler.model_dump(mode="json"),
        "cache": config.engine.cache,
    }


def seed_of(config: BatchConfig, row: Mapping[str, Any]) -> int:
    """A row's own seed, or one that follows from its id."""
    if "seed" in row:
        return row["seed"]
    return int.from_bytes(blake2b(f"{config.batch.seed} {row['id']}".encode(), digest_size=6).digest(), "little")


def answered(engine: "Engine", config: BatchConfig, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows' answers, in order. A row that cannot be decoded has an error instead of a text."""
    shared = {name: getattr(config.sampler, name) for name in config.sampler.model_fields_set}
    found: list[dict[str, Any]] = [{"id": row["id"]} for row in rows]
    prompts: dict[int, Any] = {}
    for place, row in enumerate(rows):
        try:
            prompts[place] = _prompt(engine, row)  # all of them first: the engine must be idle
        except (UserError, TypeError) as error:
            found[place]["error"] = str(error)
    places: dict[str, int] = {}
    for place, (prompt, forwards) in prompts.items():
        try:
            places[_submitted(engine, config, shared, rows[place], prompt)] = place
            found[place] |= {"nfe": forwards} if forwards else {}
        except (UserError, TypeError) as error:
            found[place]["error"] = str(error)
    for event in engine.stream():
        entry = found[places[event.request_id]]
        if event.result is not None:
            result = event.result.to_dict()
            result["nfe"] += entry.pop("nfe", 0)
            entry |= {name: result[name] for name in ("text", "finish_reason", "nfe", "holes") if name in result}
            entry |= {"tokens": len(event.result.tokens), "seed": seed_of(config, rows[places[event.request_id]])}
        elif event.error is not None:
            entry["error"] = event.error
    return found


def _prompt(engine: "Engine", row: Mapping[str, Any]) -> tuple[Any, int]:
    """A row's prompt, with one length for each hole, and the forwards that took."""
    from dlm.inference.lengths import at_longest, settle

    prompt = row.get("messages") or row["prompt"]
    if not isinstance(prompt, str) or at_longest(prompt) is prompt:
        return prompt, 0
    (prompt,), (forwards,) = settle(engine.lm, [prompt], lambda _: engine)
    return prompt, forwards


def _submitted(
    engine: "Engine", config: BatchConfig, shared: Mapping[str, Any], row: Mapping[str, Any], prompt: Any
) -> str:
    """The id of a row's request."""
    from dlm.inference.prompts import parse_holes

    own = row.get("sampler") or {}
    if not isinstance(own, Mapping):
        raise UserError(f"sampler = {str(own)[:60]}: must be an object of settings")
    holed = isinstance(prompt, str) and any(piece.hole for piece in parse_holes(prompt))
    settings: dict[str, Any] = {name: value for name, value in shared.items() if not (holed and name in _ENDS)}
    settings |= {**own, "seed": seed_of(config, row)}
    return engine.add_request(prompt, infill=holed, **settings)


_ENDS = ("gen_length", "max_gen_length", "stop")


class Worker:
    """One engine, and the folder its parts go to: what an actor is."""

    def __init__(self, config: BatchConfig) -> None:
        from dlm.inference.engine import Engine
        from dlm.models.loading import load

        self.config, self.folder = config, Folder(str(config.batch.output))
        self.engine = Engine.of(load(**config.model.model_dump()), config.engine)

    def do(self, part: Part) -> int:
        """Write one part; how many rows it has."""
        lines = [json.dumps(row, ensure_ascii=False) for row in answered(self.engine, self.config, part.rows)]
        self.folder.write(part.name, "".join(f"{line}\n" for line in lines))
        return len(lines)


def here(config: BatchConfig, parts: Sequence[Part]) -> Iterator[int]:
    """Do the parts in this process; yields the rows of each as it is done."""
    worker = Worker(config)
    for part in parts:
        yield worker.do(part)


def run(config: BatchConfig, say: Callable[[str], None], do: Do = here) -> None:
    """Do what is missing."""
    parts = missing(config, Folder(str(config.batch.output)))
    total = sum(len(part.rows) for part in parts)
    say(f"{total} rows in {len(parts)} parts to do")
    count = 0
    for rows in do(config, parts) if parts else ():
        count += rows
        say(f"{count} of {total} rows")
