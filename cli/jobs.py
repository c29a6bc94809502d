"""The jobs that are to be decoded: from a config, from options, from standard input or from JSON lines."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import Any

from dlm.config import check
from dlm.errors import UserError

from .config import SHARED, InferConfig, JobConfig, unread_of
from .options import Options
from .streams import standard_input, unicode

HOLE = re.compile(r"(?<!\\)\[MASK(:[^\]\s]{1,20})?\]")  # as dlm.infill reads it; \[MASK] is just text
SOURCES = ("--prompt", "--prompt-file", "--input", "--chat")


def collect(config: InferConfig, options: Options) -> list[JobConfig]:
    """The jobs in order, each with its request id."""
    used = [flag for flag in SOURCES if flag in options.given]
    if len(used) > 1:
        raise UserError(f"command line: {' and '.join(used)} are alternatives: give one of them")
    jobs: list[JobConfig] = []
    for job, place in _from(used[0] if used else "", config, options):
        job._place = place
        jobs.append(job)
    if not jobs:
        raise UserError(
            "nothing to do: give --prompt TEXT, --prompt-file FILE, --input FILE.jsonl, or a config with [[job]]"
        )
    for number, job in enumerate(jobs):
        _check_sudoku(job, job.title or f"job {number}")
    named = [
        job.model_copy(update={"request_id": job.request_id or name_of(number, config)})
        for number, job in enumerate(jobs)
    ]
    _check_ids(named)
    return named


def name_of(number: int, config: InferConfig) -> str:
    """The id of a job that has none: its number or, where traces are kept, a random one."""
    return token_hex(4) if config.trace.enabled else str(number)


def batches(jobs: Iterable[JobConfig], size: int) -> Iterator[list[JobConfig]]:
    """Batches of at most `size` neighbouring jobs with the same model, draft, sampler and kind."""
    for _, alike in groupby(jobs, key=lambda job: (job.model, job.draft, job.sampler, has_holes(job))):
        run = list(alike)
        yield from (run[start : start + size] for start in range(0, len(run), size))


def has_holes(job: JobConfig) -> bool:
    """Whether the job fills holes, rather than continues a text."""
    return job.sudoku is not None or HOLE.search(job.prompt or "") is not None


def _check_ids(jobs: Iterable[JobConfig]) -> None:
    """Refuse two jobs with the same id: only the id tells their results apart."""
    places: dict[str, str] = {}
    for job in jobs:
        if job.request_id in places:
            first = places[job.request_id]
            raise UserError(
                f"{job.place}: request_id {job.request_id[:60]!r} is that of {first} already (a job without one has its "
                "number from 0): give each its own"
            )
        places[job.request_id] = job.place


def _check_sudoku(job: JobConfig, name: str) -> None:
    """Refuse an invalid puzzle before a model is loaded."""
    if job.sudoku is not None:
        from dlm.sudoku.text import parse_puzzle

        try:
            parse_puzzle(job.sudoku)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None


def _from(flag: str, config: InferConfig, options: Options) -> Iterable[tuple[JobConfig, str]]:
    """The jobs, each with the place it is from."""
    given = options.given.get(flag, [])
    if flag == "--prompt":
        named = [flag if len(given) == 1 else f"{flag} {number}" for number in range(1, len(given) + 1)]
        return [(_job(config, unicode(prompt, name)), name) for prompt, name in zip(given, named, strict=True)]
    if flag == "--prompt-file":
        return [(_job(config, _text(name)), name) for name in given]
    if flag == "--input":
        return _lines(config, str(options.value(flag)))
    if config.job or sys.stdin is None or sys.stdin.isatty():
        return [(job, f"job {number}") for number, job in enumerate(config.job)]
    prompt = _text("-")
    if not prompt:
        raise UserError("standard input is empty, and neither --prompt nor a config with [[job]] was given")
    return [(_job(config, prompt), "standard input")]


def _job(config: InferConfig, prompt: str) -> JobConfig:
    return JobConfig(prompt=prompt, model=config.model, draft=config.draft, sampler=config.sampler)


def _text(name: str) -> str:
    """The text of a prompt file, without the last line end; `-` is standard input."""
    if name == "-":
        return unicode(standard_input().read(), "standard input").removesuffix("\n")
    try:
        text = Path(name).read_text("utf-8", "surrogateescape")
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise UserError(f"{name[:80]}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return unicode(text, name).removesuffix("\n")


def _lines(config: InferConfig, name: str) -> Iterator[tuple[JobConfig, str]]:
    """One job a line: a string, or an object with the keys of [[job]]; its sections are merged over the shared ones."""
    shared = {
        name: {key: getattr(section, key) for key in section.model_fields_set}
        for name, section in ((name, getattr(config, name)) for name in SHARED)
    }
    for number, line in enumerate(_text(name).split("\n"), start=1):
        where = f"{name} line {number}"
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
            raise UserError(f"{where}: cannot be read as JSON: {error}") from None
        entry = {"prompt": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict):
            raise UserError(
                f'{where}: expected a string or an object such as {{"prompt": "…"}}, not {line.strip()[:40]}'
            )
        if isinstance(entry.get("prompt"), str):
            entry["prompt"] = unicode(entry["prompt"], where)
        if isinstance(entry.get("request_id"), int):
            entry["request_id"] = str(entry["request_id"])
        for section, values in shared.items():
            own = entry.get(section, {})
            entry[section] = {**values, **own} if isinstance(own, dict) else own
        job = check(JobConfig, entry, where)
        if (problem := unread_of(job.sampler, config.sampler)) is not None:
            raise UserError(f"{where}: sampler: {problem}")
        yield job, where
