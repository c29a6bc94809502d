"""`dlm-prepare`: make beforehand what a training run then reads."""

from collections.abc import Sequence

from dlm.prepare.config import TrajectoriesConfig
from dlm.training.config import TrainConfig

from .flags import model_flag
from .options import Command, Options, Subcommands, run_subcommand

TRAJECTORIES = Command(
    name="dlm-prepare trajectories",
    summary="Let a teacher decode prompts, or decide in which order it would have written given answers, and keep the "
    "traces in trajectories.store, which data.source = traces trains on. Stopped or killed, it goes on where it was.",
    config=TrajectoriesConfig,
    flags=(model_flag("model.name", "The teacher"),),
)

ANCHORS = Command(
    name="dlm-prepare anchors",
    summary="Run the teacher of [align], or the target of [draft], over the sequences a training config will see, and "
    "keep its states in align.anchors or draft.states. Stopped or killed, it goes on where it was.",
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
    print(
        f"{config.align.anchors or config.draft.states}: the states of {done.sequences} sequences, {done.written} of them written now"
    )


SUBCOMMANDS: Subcommands = {"trajectories": (TRAJECTORIES, _trajectories), "anchors": (ANCHORS, _anchors)}


def main(argv: Sequence[str] | None = None) -> int:
    return run_subcommand("dlm-prepare", "Make beforehand what a training run then reads.", SUBCOMMANDS, argv)


if __name__ == "__main__":
    raise SystemExit(main())
