"""A model answers prompts; the conversations are JSON lines that `data.source = "chat"` trains on."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dlm.errors import UserError
from dlm.inference.decoding import Decoding, continuations
from dlm.inference.generation import engine_for
from dlm.inference.request import Generation
from dlm.models.fingerprint import weights_digest
from dlm.models.lm import LM
from dlm.models.loading import load
from dlm.prepare.config import ResponsesConfig
from dlm.prepare.prompts import Conversation, Messages, read_prompts

COLUMNS = (TextColumn("[bold]prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
AT_ONCE = 16
"""So many batches are queued together, so that one long answer delays few others."""


@dataclass(frozen=True)
class Answered:
    """What `respond` returns: prompts read, answers to them in the file, and answers written by this call."""

    prompts: int
    answers: int
    made: int
    unfinished: int
    """Answers that reached the length limit; they are in `unfinished_file` instead."""
    tokens: int
    """Tokens of the answers written by this call, unfinished ones included."""
    seconds: float
    """Since the model was loaded."""


@dataclass(frozen=True)
class Task:
    """One answer to be written; its name is a hash of everything that decides its tokens."""

    name: str
    messages: Messages
    decoding: Decoding


def unfinished_file(out: Path) -> Path:
    """The file of answers that reached the length limit: trained on, they would teach a model to stop anywhere."""
    return out.with_name(f"{out.stem}.unfinished{out.suffix}")


def respond(config: ResponsesConfig) -> Answered:
    """Write an answer to each prompt into `responses.out`; what `dlm-prepare responses` calls.

    Answers that are there already, of the same weights and settings, are not made again: a stopped run goes on where it
    was. What an answer was decoded together with cannot change its tokens.
    """
    r, console = config.responses, Console(stderr=True)
    if not r.paths:
        raise UserError("responses.paths is not set: name JSON lines with prompts (--responses.paths FILE.jsonl)")
    conversations = islice(read_prompts(r), r.samples)
    first = next(conversations, None)  # a mistake in the files is found before a model is loaded
    if first is None:
        raise UserError(f"responses.paths = {list(r.paths)}: no prompt in there")
    out = Path(r.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = {True: _opened(stack, out), False: _opened(stack, unfinished_file(out))}
        done = _names(files[True]) | (set() if r.unfinished == "keep" else _names(files[False]))
        lm, started = load(**config.model.model_dump()), monotonic()
        identity, made, unfinished, tokens, names = _identity(lm, config), 0, 0, 0, dict[str, None]()
        bar = stack.enter_context(Progress(*COLUMNS, console=console, disable=not console.is_terminal))
        task, rest, prompts = bar.add_task("prompts", total=r.samples), chain([first], conversations), 0
        while batch := list(islice(rest, AT_ONCE * r.batch_size)):
            tasks = [task for one in batch for task in _tasks(lm, config, one, identity)]
            names |= dict.fromkeys(task.name for task in tasks)
            for answer, result in _answers(lm, config, [task for task in tasks if task.name not in done]):
                kept = result.finish_reason == "stop" or r.unfinished == "keep"
                made, unfinished, tokens = made + kept, unfinished + (not kept), tokens + len(result.tokens)
                _write(files[kept], lm, config, answer, result)
                bar.advance(task, 1 / config.sampler.num_samples)
            prompts += len(batch)
            bar.update(task, completed=prompts)
        answers = len(names.keys() & _names(files[True]))
    return Answered(prompts, answers, made, unfinished, tokens, monotonic() - started)


def _identity(lm: LM, config: ResponsesConfig) -> Any:
    """A hash of what decides answers besides their prompts; the settings include the seed."""
    settings = {
        "weights": weights_digest(lm.network),
        "template": lm.require_tokenizer().chat_template,
        "sampler": config.sampler.model_dump(exclude={"num_samples"}),
        "engine": config.engine.model_dump(include={"cache", "refresh_interval", "cache_delay"}),
    }
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=12)


def _tasks(lm: LM, config: ResponsesConfig, conversation: Conversation, identity: Any) -> Iterator[Task]:
    name = identity.copy()
    name.update(json.dumps(conversation.messages).encode())
    try:
        found = continuations(
            lm, [conversation.messages], config.sampler, where=conversation.where, request_ids=[name.hexdigest()]
        )
    except UserError as error:
        raise UserError(f"{conversation.where}: {str(error).removeprefix('prompt 0').lstrip(': ')}") from None
    for decoding in found:
        yield Task(decoding.request.request_id, conversation.messages, decoding)


def _answers(lm: LM, config: ResponsesConfig, tasks: Sequence[Task]) -> Iterator[tuple[Task, Generation]]:
    """Each task with its answer, in the order of the tasks, as soon as it and those before it are done."""
    if not tasks:
        return
    engine = engine_for(lm, [task.decoding for task in tasks], config.engine, config.responses.batch_size)
    for task in tasks:
        engine.submit(task.decoding)
    waiting: dict[str, Generation] = {}
    left = iter(tasks)
    task = next(left)
    for event in engine.stream():
        if event.error is not None:
            raise UserError(f"request {event.request_id!r}: {event.error}")
        if event.result is not None:
            waiting[event.request_id] = event.result
        while task is not None and task.name in waiting:
            yield task, waiting.pop(task.name)
            task = next(left, None)


def _write(file: IO[str], lm: LM, config: ResponsesConfig, task: Task, result: Generation) -> None:
    """Write one line, which is on the disk when this returns."""
    answer = {"role": "assistant", "content": result.text.strip()}
    line = {
        "messages": [*task.messages, answer],
        "model": lm.name,
        "temperature": config.sampler.temperature,
        "finish_reason": result.finish_reason,
        "tokens": len(result.tokens),
        "id": task.name,
    }
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _opened(stack: ExitStack, path: Path) -> IO[str]:
    """The file, opened for appending; half a line that a killed run left is cut off."""
    try:
        file = stack.enter_context(path.open("a+", encoding="utf-8"))
        file.seek(0)
        whole = file.read()
        if whole and not whole.endswith("\n"):
            file.truncate(len(whole[: whole.rfind("\n") + 1].encode()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"responses.out = {str(path)!r} cannot be written: {error}") from error
    return file


def _names(file: IO[str]) -> set[str]:
    """The names of the answers in a file."""
    file.seek(0)
    found: set[str] = set()
    for number, line in enumerate(file, 1):
        try:
            found.add(json.loads(line)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file.name}:{number}: no line that dlm-prepare responses wrote; give another responses.out"
            ) from error
    return found
