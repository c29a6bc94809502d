"""`dlm-batch`: a file of prompts to a folder of answers, resumable, on one machine or many."""

import sys
from collections.abc import Sequence

from dlm.errors import UserError
from dlm.serving.batch_config import BatchConfig

from .flags import Flag, model_flag
from .options import Command, Options

COMMAND = Command(
    name="dlm-batch",
    summary="Answer a file of prompts: JSONL (a string, or an object of id, prompt or messages, seed, sampler) or Parquet in, a "
    "folder of JSONL parts out. The same command goes on where it was stopped; texts do not depend on the number of actors.",
    config=BatchConfig,
    flags=(
        model_flag("model.name"),
        Flag(name="--input", metavar="FILE", sets="batch.input", help="Prompts: a path or a URL (s3://…)."),
        Flag(name="--output", metavar="FOLDER", sets="batch.output", help="Answers: a path or a URL."),
        Flag(name="--actors", metavar="N", sets="batch.actors", help="Engines side by side (needs Ray beyond one)."),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    return COMMAND.run(_work, argv)


def _work(config: BatchConfig, options: Options) -> None:
    for name in ("input", "output"):
        if getattr(config.batch, name) is None:
            raise UserError(f"command line: --{name} is required (see dlm-batch --help)")

    from dlm.serving.bulk import here, run

    do = here
    if config.batch.actors > 1 or config.ray.address is not None:
        from dlm.serving.ray import fan_out as do
    run(config, lambda line: print(line, file=sys.stderr, flush=True), do)


if __name__ == "__main__":
    raise SystemExit(main())
