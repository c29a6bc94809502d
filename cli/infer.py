"""`dlm-infer`: decode prompts, fill holes, solve Sudoku, chat."""

import os
import sys
from collections.abc import Sequence

from dlm.errors import UserError

from .config import InferConfig
from .flags import Flag, model_flag
from .options import Command, Options

COMMAND = Command(
    name="dlm-infer",
    summary="Write text, fill in holes ([MASK:12] is twelve tokens long, [MASK:4-16] as long as fits best) and solve "
    "Sudoku by masked diffusion. "
    "Standard input is the prompt when it is not a terminal and no other is given.",
    config=InferConfig,
    flags=(
        model_flag("model.name"),
        Flag("--prompt", "TEXT", "A prompt; its [MASK:n] holes are filled, else it is continued.", repeatable=True),
        Flag("--prompt-file", "FILE", "A prompt from a file; - is standard input.", repeatable=True),
        Flag(
            "--input",
            "FILE",
            'JSON lines: "text" or {"prompt": …, "request_id": …, "sampler": {…}}; - is standard input.',
        ),
        Flag("--output", "FILE", "Write one JSON object a result there."),
        Flag(
            "--json", help="Print one JSON object a result: prompt, text, tokens, nfe, tpf, …", sets="output.json_lines"
        ),
        Flag("--trace", help="Record every step: dlm-replay ID shows them again.", sets="trace.enabled"),
        Flag(
            "--allow-long",
            help="Let prompt and generation be longer than the context the model was made for.",
            sets="sampler.allow_long",
        ),
        Flag("--chat", help="Talk with the model, turn by turn, through its chat template."),
        Flag("--quiet", help="Print the text alone.", sets="output.quiet"),
        Flag("--url", "ADDRESS", "Have the dlm-serve there decode, and load nothing here."),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    return COMMAND.run(_work, argv)


def _work(config: InferConfig, options: Options) -> None:
    if (url := options.value("--url")) is not None:
        from .remote import decode_there

        return decode_there(url, config, options)
    if "--chat" in options.given:
        from .chat import chat

        return chat(config)
    from .jobs import batches, collect, has_holes

    jobs = collect(config, options)
    no_text = all(map(has_holes, jobs))
    for job in jobs:
        if job.draft.model is not None and has_holes(job) and (no_text or job.draft != config.draft):
            raise UserError(
                f"{job.place}: [draft] model = {job.draft.model!r} continues texts, and this fills holes: leave it out"
            )

    from .decode import decode
    from .show import Printer, draft_of, lm_of, names_of, recording

    output, trace = options.value("--output"), config.trace
    if int(os.environ.get("RANK", "0")) > 0:  # torchrun: all processes decode the same, and only the first one prints
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        output, trace = None, trace.model_copy(update={"enabled": False})
    names = [name for job in jobs for name in names_of(job)]
    with Printer(config.output, output) as printer, recording(trace, names) as printer.store:
        for batch in batches(jobs, 1 if printer.shows_steps else config.batch_size):
            lm = lm_of(batch[0].model)
            draft = None if has_holes(batch[0]) else draft_of(batch[0].draft.model, lm)
            decode(lm, batch, printer, config.engine, draft=draft)


if __name__ == "__main__":
    raise SystemExit(main())
