"""`dlm-infer`: decode prompts, infill holes, solve Sudoku, chat. Knows no algorithm: it collects, calls `dlm`, and shows."""

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlm.errors import UserError
from dlm.inference.config import EngineConfig

from .config import InferConfig, JobConfig
from .jobs import batches, collect, has_holes
from .options import Command, Flag, Options, model_flag

if TYPE_CHECKING:
    from dlm import LM, Generation

    from .show import Printer

COMMAND = Command(
    name="dlm-infer",
    summary="Write text, fill in holes ([MASK:12] is twelve tokens long, [MASK:4-16] as long as fits best) and solve "
    "Sudoku by masked diffusion. "
    "Standard input is the prompt when it is not a terminal and no other is given.",
    config=InferConfig,
    flags=(
        model_flag("model.name"),
        Flag(
            name="--prompt",
            metavar="TEXT",
            repeatable=True,
            help="A prompt; its [MASK:n] holes are filled, else it is continued.",
        ),
        Flag(name="--prompt-file", metavar="FILE", repeatable=True, help="A prompt from a file; - is standard input."),
        Flag(
            name="--input",
            metavar="FILE",
            help='JSON lines: "text" or {"prompt": …, "request_id": …, "sampler": {…}}; - is standard input.',
        ),
        Flag(name="--output", metavar="FILE", help="Write one JSON object a result there."),
        Flag(
            name="--json",
            sets="output.json_lines",
            help="Print one JSON object a result: prompt, text, tokens, nfe, tpf, …",
        ),
        Flag(name="--trace", sets="trace.enabled", help="Record every step: dlm-replay ID shows them again."),
        Flag(
            name="--allow-long",
            sets="sampler.allow_long",
            help="Let prompt and generation be longer than the context the model was made for.",
        ),
        Flag(name="--chat", help="Talk with the model, turn by turn, through its chat template."),
        Flag(name="--quiet", sets="output.quiet", help="Print the text alone."),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    return COMMAND.run(_work, argv)


def _work(config: InferConfig, options: Options) -> None:
    if "--chat" in options.given:
        from .chat import chat

        return chat(config)
    jobs = collect(config, options)

    from .show import Printer, lm_of, names_of, recording

    output, trace = options.value("--output"), config.trace
    if int(os.environ.get("RANK", "0")) > 0:  # torchrun: all processes decode alike, the first one tells
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        output, trace = None, trace.model_copy(update={"enabled": False})
    names = [name for job in jobs for name in names_of(job)]
    with Printer(config.output, output) as printer, recording(trace, names) as printer.store:
        for batch in batches(jobs, 1 if printer.shows_steps else config.batch_size):
            decode(lm_of(batch[0].model), batch, printer, config.engine)


def decode(
    lm: "LM", batch: Sequence[JobConfig], printer: "Printer", engine: EngineConfig, said: str | None = None
) -> "list[Generation]":
    """Decode one batch of jobs alike, and show it.

    Results name the prompt they answer: the job's own text or puzzle or, of a conversation, what the user `said` last.
    """
    from dlm.inference.generation import continue_all, fill_all

    prompts = [lm.encode(job.sudoku) if job.sudoku is not None else str(job.prompt) for job in batch]
    names, sampler = [job.request_id for job in batch], batch[0].sampler
    run = fill_all if has_holes(batch[0]) else continue_all
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


def _placed(message: str, batch: Sequence[JobConfig]) -> str:
    """A message about "prompt 3" with the place where that prompt was written."""
    found = re.match(r"prompt (\d+)\b:?", message)
    place = batch[int(found[1])].place if found is not None else ""
    return message if found is None or not place else f"{place}:{message[found.end() :]}"


if __name__ == "__main__":
    raise SystemExit(main())
