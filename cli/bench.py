"""`dlm-bench`: measure decoding, load, quality, kernels, training, tokenizer, traces. Knows no measurement: it asks and shows."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dlm.bench.config import BenchConfig
from dlm.bench.run import SUBCOMMANDS, measure, wanted
from dlm.config import nearest
from dlm.errors import UserError

from .options import Command, Flag, Options

WIDTH = 200
KEYS = {
    "--dataset": "infer.dataset",
    "--num-samples": "infer.num_samples",
    "--source": "infer.source",
    "--skip-sample": "infer.skip_sample",
    "--max-tokens": "infer.max_tokens",
    "--block-length": "infer.block_length",
    "--denoising-steps": "infer.denoising_steps",
    "--peer-path": "trace.peer_path",
    "--output": "output.file",
    "--model": "model.name",
}
"""Flags that are short for a key."""

FLAGS = (
    Flag(name="--model", metavar="NAME", help="A bundled model (pico, sudoku), a folder, or a hub id."),
    Flag(name="--dataset", metavar="FILE", help="infer: JSONL of question, answer, choices, source."),
    Flag(name="--num-samples", metavar="N", help="infer: questions at most."),
    Flag(name="--source", metavar="NAME", help="infer: questions of this source only (gsm8k, math500, mmlu, …)."),
    Flag(name="--skip-sample", metavar="N", help="infer: leave out the first N questions."),
    Flag(name="--max-tokens", metavar="N", help="infer: tokens to generate for each question, at most."),
    Flag(name="--block-length", metavar="N", help="infer: tokens denoised together."),
    Flag(name="--denoising-steps", metavar="N", help="infer: steps a block."),
    Flag(name="--skip-vanilla", sets="infer.skip_vanilla", help="infer: leave out plain decoding."),
    Flag(name="--peer-path", metavar="FOLDER", help="trace: a checkout of DiffTrace, whose code runs beside ours."),
    Flag(name="--output", metavar="FILE", help="Where the JSON goes (bench.json)."),
)


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """The command behind a subcommand's word."""

    def parse(self, argv: Sequence[str]) -> Options:
        """As every command, and then the flags that are short for a key become that key."""
        options = super().parse(argv)
        for flag, key in KEYS.items():
            value = options.value(flag)
            if value is not None:
                options.overrides[key] = value
        return options


COMMAND = Bench(
    name="dlm-bench",
    summary="Measure: dlm-bench [SUBCOMMAND] [OPTION]…, where SUBCOMMAND is one of "
    f"{', '.join(SUBCOMMANDS)}; without one, all sections that the config has. infer: a dataset's questions answered "
    "by the engine and by plain decoding, and traffic where there is a [load]. Prints tables, writes JSON, draws a plot.",
    config=BenchConfig,
    flags=FLAGS,
)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    subcommand = words.pop(0) if words and words[0] in SUBCOMMANDS else None
    if words and not words[0].startswith("-"):
        known = f"(they are {', '.join(SUBCOMMANDS)})"
        print(f'dlm-bench: no such subcommand: "{words[0]}"{nearest(words[0], SUBCOMMANDS)} {known}', file=sys.stderr)
        return 2
    return COMMAND.run(lambda config, options: _work(config, subcommand), words)


def _work(config: BenchConfig, subcommand: str | None) -> None:
    sections = wanted(config, subcommand)

    from dlm.bench.report import Report, show
    from dlm.evaluation.card import machine

    from .live import console_for

    report, console = Report(config, machine()), console_for(sys.stdout)
    if not console.is_terminal:  # a file is as wide as it must be; a terminal's lines are folded
        console.width = WIDTH
    for section in sections:
        finding = measure(config, section, _say)
        show(console, finding)
        report.add(finding)  # after it was shown: a full disk may keep it from the file
    if report.file is not None:
        print(f"written: {report.file}", file=sys.stderr)
    try:
        picture = report.plot()
    except UserError as error:  # an optional extra is missing: everything else is there
        print(f"dlm-bench: {error}", file=sys.stderr)
    else:
        if picture is not None:
            print(f"written: {picture}", file=sys.stderr)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
