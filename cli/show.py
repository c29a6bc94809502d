"""Shows results: as a live view, as text with a summary line, or as JSON lines."""

import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from dlm.errors import UserError
from dlm.inference.config import ModelSection
from dlm.trace.config import TraceConfig

from .config import JobConfig, OutputConfig
from .live import Canvas, View, console_for, draw_sudoku, draw_text
from .streams import to_json

if TYPE_CHECKING:
    from dlm import LM, Generation, TraceStore


def lm_of(section: ModelSection) -> "LM":
    return _load(**section.model_dump())


@cache
def _load(**section: Any) -> "LM":
    import dlm

    return dlm.load(**section)


_drafts: dict[tuple[str, int], tuple[Any, Any]] = {}
"""Loaded drafts, each with its model, which keeps the model's id() from being reused."""


def draft_of(name: str | None, lm: "LM") -> Any:
    """The draft that [draft] names, loaded once for each model."""
    if name is None:
        return None
    if (name, id(lm)) not in _drafts:
        from dlm.inference.drafting.making import named

        _drafts[name, id(lm)] = lm, named(name, lm, "[draft] model")
    return _drafts[name, id(lm)][1]


@contextmanager
def recording(config: TraceConfig, names: Sequence[str] = ()) -> "Iterator[TraceStore | None]":
    """The store of [trace], if traces are to be kept; all of them are on the disk at the end.

    Raises UserError if one of the ids `names` is taken.
    """
    if not config.enabled:
        yield None
        return
    from dlm.trace.store import TraceStore

    with TraceStore.of(config) as store:
        if not config.overwrite:
            _refuse_taken(store, names)
        yield store


def _refuse_taken(store: "TraceStore", names: Sequence[str]) -> None:
    """Refuse ids that are taken, before a model is loaded."""
    for name in filter(store.wants, names):
        if name in store:
            raise UserError(
                f"request_id {name[:60]!r}: {store.path} has a trace of this id: give another request_id, or replace it "
                "with --trace.overwrite (overwrite = true in [trace])"
            )


class Printer:
    """Shows what `output` asks for. A context, because --output opens a file."""

    def __init__(self, output: OutputConfig, file: str | None = None, echo: bool = True) -> None:
        self.output, self.file, self.echo = output, file, echo
        self.console = console_for(sys.stdout)
        self.sink: IO[str] | None = None
        self.written, self.seconds = 0, 0.0  # seconds of the current batch
        self.store: TraceStore | None = None
        """Where every step is recorded."""

    def __enter__(self) -> "Printer":
        if self.file is not None:
            try:
                # Opened for appending: its content is lost only when the first result comes.
                self.sink = Path(self.file).open("a", encoding="utf-8")
            except (OSError, ValueError) as error:
                raise self._unwritable(error) from None
        return self

    def __exit__(self, *error: object) -> None:
        if self.sink is not None:
            if error[0] is None and not self.written:
                self._empty()
            with suppress(OSError):  # a full disk was reported when the result could not be written
                self.sink.close()
            if not self.output.quiet:
                print(f"{self.file}: {self.written} results", file=sys.stderr)

    def _empty(self) -> None:
        assert self.sink is not None
        if stat.S_ISREG(os.fstat(self.sink.fileno()).st_mode):  # a device or a pipe has nothing to lose
            self.sink.truncate(0)

    def _write(self, line: str) -> None:
        assert self.sink is not None
        try:
            if not self.written:
                self._empty()
            print(line, file=self.sink, flush=True)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError | ValueError) -> UserError:
        before = f"; {self.written} results were written before" if self.written else ""
        return UserError(f"{self.file}: cannot be written: {getattr(error, 'strerror', None) or error}{before}")

    @property
    def speaks(self) -> bool:
        """Whether standard output is for a human: neither quiet, nor JSON, nor a file instead."""
        return not (self.output.quiet or self.output.json_lines or self.file is not None)

    @property
    def shows_steps(self) -> bool:
        return self.speaks and (self.output.live if self.console.is_terminal else self.output.snapshots > 0)

    @contextmanager
    def watch(self, lm: "LM", job: JobConfig) -> Iterator[View | None]:
        """Time a batch, and show its steps if they are to be seen."""
        started = time.perf_counter()
        if not self.shows_steps:
            yield None
            self.seconds = time.perf_counter() - started
            return
        if job.sudoku is not None:
            draw = draw_sudoku(_plain(lm))
        else:
            begin = [] if lm.tokenizer is None else lm.tokenizer.begin
            draw = draw_text(_plain(lm), self.console.height - 4, begin)
        delay, snapshots = self.output.delay, self.output.snapshots
        with View(job.title or "denoising", lm.mask_id, draw, self.console, delay, snapshots) as view:
            yield view
        self.seconds = view.seconds

    def show(self, lm: "LM", job: JobConfig, result: "Generation", said: str | None = None) -> None:
        """Print one result in the chosen form.

        JSON names the prompt it answers: the job's own text or puzzle or, of a conversation, what the user `said` last.
        """
        if self.sink is not None or self.output.json_lines:
            line = {"prompt": (job.prompt if job.sudoku is None else job.sudoku) if said is None else said}
            line |= result.to_dict()
            if self.sink is not None:
                self._write(json.dumps(line, ensure_ascii=False))
            else:
                print(to_json(line), flush=True)
        elif self.output.quiet:
            print(result.text, flush=True)
        else:
            self._show(lm, job, result)
        self.written += 1

    def interrupted(
        self, lm: "LM", batch: Sequence[JobConfig], results: "Sequence[Generation]", said: str | None = None
    ) -> None:
        """Show what Ctrl-C left of a batch: finished results as always, others marked, and say what is kept."""
        jobs = {name: job for job in batch for name in names_of(job)}
        undone = [result for result in results if result.finish_reason == "interrupted"]
        for result in results:
            if result in undone and self.sink is not None:
                continue  # a file holds whole results
            if result in undone and self.speaks:
                self._partly(result)
            else:
                self.show(lm, jobs[result.request_id], result, said)
        whole = self.written - (0 if self.sink is not None or self.speaks else len(undone))
        words = f"interrupted; whole results: {whole}"
        if undone and self.sink is None:
            words += f"; unfinished: {len(undone)}" + (
                ' (finish_reason "interrupted")' if self.output.json_lines else ""
            )
        if self.store is not None:
            words += f"; {self.store.path} keeps the traces of whole ones only"
        print(words, file=sys.stderr)

    def _partly(self, result: "Generation") -> None:
        """An unfinished text; on a terminal with a live view its last picture is still there, if it showed all of it."""
        room = self.console.height - 4 if self.shows_steps and self.console.is_terminal else 0
        if result.text.count("\n") >= room:
            self.console.print(Text(result.text))
        self.console.print(Text(f"unfinished: interrupted after {result.nfe} NFE; ░ was not decided yet\n", "dim"))

    def _show(self, lm: "LM", job: JobConfig, result: "Generation") -> None:
        if job.title:
            self.console.print(Text(job.title, "bold"))
        if job.sudoku is not None:
            self.console.print(*_solution(lm, job.sudoku, result.text), sep="\n")
        elif self.echo and self.console.is_terminal and job.prompt and not has_text(result):
            self.console.print(Text.assemble((job.prompt, "dim"), result.text))
        else:
            self.console.print(Text(result.text))
        speed = len(result.tokens) / max(self.seconds, 1e-9)
        work = f"{len(result.tokens)} generated tokens · {result.nfe} NFE · {result.tpf:.2f} TPF"
        if getattr(result, "tau", None) is not None:
            work += f" · {result.tau:.2f} tokens a check"
        if (attempts := getattr(result, "attempts", None)) is not None and (attempts > 1 or not result.passed):
            end = "until it passed its check" if result.passed else "and never passed its check"
            work += f" · filled {'once' if attempts == 1 else f'{attempts} times'} {end}"
        facts = f"{work}{_threads(lm)} · {speed:,.0f} tokens/s"
        recorded = "" if self.store is None else f"\nrecorded: dlm-replay {result.request_id}"
        self.console.print(Text(f"{facts}{recorded}\n", "dim"))


def _threads(lm: "LM") -> str:
    """How many threads compute, and whose kernels; nothing for a model that is not on a CPU."""
    device = getattr(lm, "device", None)  # test doubles have none
    if device is None or device.type != "cpu":
        return ""
    from dlm.kernels.paths import described

    return f" · {described(lm.dtype)}"


def names_of(job: JobConfig) -> list[str]:
    """The request ids of a job's samples."""
    count = job.sampler.num_samples
    return [job.request_id] if count == 1 else [f"{job.request_id}/{number}" for number in range(count)]


def has_text(result: "Generation") -> bool:
    """Whether .text is the whole text with its holes filled, rather than what follows the prompt."""
    return result.holes is not None


def _solution(lm: "LM", puzzle: str, answer: str) -> tuple[Any, Text]:
    """The finished grid, and whether it is a solution."""
    from dlm.sudoku.solver import check_solution
    from dlm.sudoku.text import parse_puzzle

    given = parse_puzzle(puzzle)
    canvas = Canvas(lm.mask_id)
    canvas.tokens = np.asarray(lm.encode(answer))
    canvas.when = np.where(given > 0, -1, 0)
    canvas.step = 99  # long after the last step, so that nothing is highlighted
    solved = check_solution(given, np.array([int(character) for character in answer if character.isdecimal()]))
    verdict = (
        Text("solved: every row, column and box holds 1 to 9", "green") if solved else Text("not a solution", "red")
    )
    return draw_sudoku(_plain(lm))(canvas), verdict


def _plain(lm: "LM") -> Callable[[Sequence[int]], str]:
    """Decode with special tokens, which the view shows too."""
    return lambda ids: lm.decode(ids, skip_special=False)
