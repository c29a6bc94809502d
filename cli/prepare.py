"""`dlm-prepare`: make beforehand what a training run then reads. Knows no algorithm."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from dlm.config import nearest
from dlm.prepare.config import TrajectoriesConfig
from dlm.training.config import TrainConfig

from .flags import model_flag
from .options import Command, Options

TRAJECTORIES = Command(
    name="dlm-prepare trajectories",
    summary="Let a teacher decode prompts, or decide in which order it would have written given answers, and keep the "
    "traces in trajectories.store, which data.source = traces trains on. Stopped or killed, it goes on where it was.",
    config=TrajectoriesConfig,
    flags=(model_flag("model.name", "The teacher"),),
)

ANCHORS = Command(
    name="dlm-prepare anchors",
    summary="Run the teacher of [align] over the sequences a training config will see, and keep its states in "
    "align.anchors. Stopped or killed, it goes on where it was.",
    config=TrainConfig,
    flags=(model_flag("align.teacher", "The teacher"),),
)


def _trajectories(config: TrajectoriesConfig, options: Options) -> None:
    from dlm.prepare.trajectories import prepare

    done, t = prepare(config), config.trajectories
    into = t.store if t.parquet is None else f"{t.store} and {t.parquet}"
    print(f"{into}: {done.trajectories} trajectories of {done.prompts} prompts, {done.made} of them made now")


def _anchors(config: TrainConfig, options: Options) -> None:
    from dlm.training.anchors import write_anchors

    done = write_anchors(config)
    print(f"{config.align.anchors}: the states of {done.sequences} sequences, {done.written} of them written now")


SUBCOMMANDS: dict[str, tuple[Command, Callable[[Any, Options], None]]] = {
    "trajectories": (TRAJECTORIES, _trajectories),
    "anchors": (ANCHORS, _anchors),
}


def main(argv: Sequence[str] | None = None) -> int:
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in SUBCOMMANDS:
        command, work = SUBCOMMANDS[name]
        return command.run(work, rest)
    if name in ("--help", "-h"):
        print("Usage: dlm-prepare SUBCOMMAND [OPTION]… (each has a --help of its own)\n")
        for known, (command, _) in SUBCOMMANDS.items():
            print(f"  {known}: {command.summary}")
        return 0
    known = ", ".join(SUBCOMMANDS)
    print(f"dlm-prepare: unknown subcommand {name!r}{nearest(name, SUBCOMMANDS)} (known: {known})", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
