"""`dlm-eval`: models × decodings × tasks, one file of results, each with its error."""

import sys
from collections.abc import Sequence
from pathlib import Path

from dlm.errors import UserError
from dlm.evaluation.suite.config import EvalConfig
from dlm.evaluation.suite.task_section import TaskSection

from .flags import Flag, model_flag
from .options import Command, Options

COMMAND = Command(
    name="dlm-eval",
    summary="Evaluate models: HumanEval, MBPP and infilling with programs run in a sandbox, Sudoku, questions of a file, bits a "
    "byte, lm-eval's tasks and your own, under one way of decoding or many. Writes one JSON file with every error, a record "
    "an item, a Markdown table and plots. Killed and run again it goes on where it was.",
    config=EvalConfig,
    flags=(
        model_flag("eval.models"),
        Flag(name="--output", metavar="FILE", sets="output.file", help="Where the JSON goes (eval.json)."),
        Flag(name="--task", metavar="FILE.py", repeatable=True, help="A task of your own: a Python file with a dlm.evaluation.Task."),
        Flag(name="--again", metavar="FILE", help="Run what these results came from once more, and say what differs."),
        Flag(name="--allow-unsandboxed", sets="eval.allow_unsandboxed", help="Run programs in your own account where there is no sandbox."),
    ),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return COMMAND.run(_work, argv)


def _work(config: EvalConfig, options: Options) -> int:
    if "--again" in options.given:
        return _again(Path(options.value("--again")), config, options)
    own = tuple(TaskSection(kind="file", data=file) for file in options.given.get("--task", []))
    config = config.model_copy(update={"task": (*config.task, *own)})
    _evaluate(config)
    return 0


def _evaluate(config: EvalConfig) -> dict:
    from dlm.atomic import write_text
    from dlm.evaluation.suite.plot import draw
    from dlm.evaluation.suite.report import table
    from dlm.evaluation.suite.run import evaluate_all

    values = evaluate_all(config, _say).values
    text, file = table(values), config.output.file
    print(text)
    write_text(file.with_suffix(".md"), text)
    written = [file, file.with_suffix(".md"), file.with_suffix(".records.jsonl")]
    if config.output.plot:
        try:
            written += [picture] if (picture := draw(values, file.with_suffix(".png"))) is not None else []
        except UserError as error:  # an optional extra is missing: everything else is there
            _say(f"dlm-eval: {error}")
    _say(f"written: {', '.join(map(str, written))}")
    return values


def _again(file: Path, config: EvalConfig, options: Options) -> int:
    """Exit status 0 where everything came out the same, else 1."""
    from dlm.evaluation.suite.again import config_of, differences

    if options.files or set(options.overrides) - {"output.file", "output.plot", "eval.batch_size", "eval.workers"}:
        raise UserError("--again takes its settings from the results: give no --config and no other settings beside it")
    before, values = config_of(file)
    target = config.output.file if "output.file" in options.overrides else file.with_suffix(".again.json")
    kept = {"output": config.output.model_copy(update={"file": target})}
    now = _evaluate(before.model_copy(update=kept))
    found = differences({k: values[k] for k in ("about", "runs")}, {k: now[k] for k in ("about", "runs")})
    print("\n".join(found) if found else "the same in every figure")
    return 1 if found else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
