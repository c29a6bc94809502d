"""`dlm-bench`: measure decoding, load, training, tokenizers and servers."""

import sys
from collections.abc import Sequence
from functools import partial

from dlm.bench.config import BenchConfig
from dlm.bench.run import SUBCOMMANDS, measure, wanted

from .flags import Flag, model_flag
from .options import Command, Options, Subcommands, run_subcommand

WIDTH = 200
MODEL_KEYS = {"tokenizer": "tokenizer.path"}
"""What --model means to a subcommand, where it is not model.name."""

SUMMARY = (
    "Measure: dlm-bench [SUBCOMMAND] [OPTION]…, where SUBCOMMAND is one of "
    f"{', '.join(SUBCOMMANDS)}; without one, all sections that the config has. infer: a dataset's questions answered "
    "by the engine and by plain decoding, and traffic where there is a [load]; serve: a server's latencies. Prints tables and writes JSON. Quality against speed: dlm-eval."
)

FLAGS = (
    Flag("--dataset", "FILE", "infer: JSONL of question, answer, choices, source.", sets="infer.dataset"),
    Flag("--num-samples", "N", "infer: questions at most.", sets="infer.num_samples"),
    Flag("--source", "NAME", "infer: questions of this source only (gsm8k, math500, mmlu, …).", sets="infer.source"),
    Flag("--skip-sample", "N", "infer: leave out the first N questions.", sets="infer.skip_sample"),
    Flag("--max-tokens", "N", "infer: tokens to generate for each question, at most.", sets="infer.max_tokens"),
    Flag("--block-length", "N", "infer: tokens denoised together.", sets="infer.block_length"),
    Flag("--denoising-steps", "N", "infer: steps a block.", sets="infer.denoising_steps"),
    Flag("--skip-vanilla", help="infer: leave out plain decoding.", sets="infer.skip_vanilla"),
    Flag("--output", "FILE", "Where the JSON goes (bench.json).", sets="output.file"),
)


def _command(subcommand: str) -> Command:
    """What a subcommand reads; `""` for the command without one."""
    return Command(
        name="dlm-bench",
        summary=SUMMARY,
        config=BenchConfig,
        flags=(model_flag(MODEL_KEYS.get(subcommand, "model.name")), *FLAGS),
    )


def main(argv: Sequence[str] | None = None) -> int:
    table: Subcommands = {name: (_command(name), partial(_work, subcommand=name)) for name in SUBCOMMANDS}
    return run_subcommand("dlm-bench", SUMMARY, table, argv, otherwise=(_command(""), partial(_work, subcommand=None)))


def _work(config: BenchConfig, options: Options, subcommand: str | None) -> None:
    sections = wanted(config, subcommand)

    from dlm.bench.report import Report, show
    from dlm.evaluation.card import machine
    from dlm.kernels.paths import described

    from .live import console_for

    facts = f"{machine()}; {described(threads=config.threads)}"
    report, console = Report(config, facts), console_for(sys.stdout)
    if not console.is_terminal:  # a file is as wide as it must be; a terminal's lines are folded
        console.width = WIDTH
    for section in sections:
        finding = measure(config, section, _say)
        show(console, finding)
        report.add(finding)  # after it was shown: a full disk may keep it from the file
    if report.file is not None:
        print(f"written: {report.file}", file=sys.stderr)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
