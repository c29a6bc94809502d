"""Decodes one batch of jobs for `dlm-infer`, with and without --chat, and shows the results."""

import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError
from dlm.inference.config import EngineConfig, SamplerConfig

from .config import JobConfig
from .jobs import has_holes

if TYPE_CHECKING:
    from dlm import LM, Engine, Generation

    from .show import Printer


def decode(
    lm: "LM",
    batch: Sequence[JobConfig],
    printer: "Printer",
    engine: EngineConfig,
    said: str | None = None,
    draft: Any = None,
) -> "list[Generation]":
    """The results of one batch of jobs with the same model and sampler; shows them too.

    Results name the prompt they answer: the job's own text or puzzle or, of a conversation, what the user `said` last.
    """
    from dlm.inference.generation import continue_all, fill_all

    prompts = [lm.encode(job.sudoku) if job.sudoku is not None else str(job.prompt) for job in batch]
    names, sampler = [job.request_id for job in batch], batch[0].sampler
    run = fill_all if has_holes(batch[0]) else continue_all if draft is None else partial(continue_all, draft=draft)
    device = getattr(lm, "device", None)  # test doubles have none
    if device is not None and device.type == "cuda" and not (lm.refuses or has_holes(batch[0])):
        run = partial(run, prepare=partial(_prepare, sampler, len(prompts) * sampler.num_samples, printer))
    try:
        with printer.watch(lm, batch[0]) as view:
            on_step = None if view is None else view.on_step
            results = run(lm, prompts, sampler, engine, printer.store, names, on_step=on_step)
    except KeyboardInterrupt as stop:
        printer.interrupted(lm, batch, getattr(stop, "results", ()), said)
        raise
    except UserError as error:
        raise UserError(_placed(str(error), batch)) from None
    for number, result in enumerate(results):  # the samples of one prompt stand next to each other
        printer.show(lm, batch[number // batch[0].sampler.num_samples], result, said)
    return results


def _prepare(sampler: SamplerConfig, count: int, printer: "Printer", engine: "Engine") -> None:
    """Say what memory is for and, before the clock of the first answer runs, have kernels compiled and steps recorded."""
    from dlm.inference.warming import start_up

    def say(line: str) -> None:
        if not printer.output.quiet:
            print(f"dlm-infer: {line}", file=sys.stderr, flush=True)

    say(str(engine.memory))
    batches = (min(count, engine.config.max_num_requests),)
    start_up(engine, sampler, batches, lambda done, most: say(f"warmed up {done} of {most}"))


def _placed(message: str, batch: Sequence[JobConfig]) -> str:
    """A message about "prompt 3" with the place where that prompt was written."""
    found = re.match(r"prompt (\d+)\b:?", message)
    place = batch[int(found[1])].place if found is not None else ""
    return message if found is None or not place else f"{place}:{message[found.end() :]}"
