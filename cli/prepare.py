"""`dlm-prepare`: make data that a training run reads."""

from collections.abc import Sequence

from dlm.prepare.config import FillingsConfig, ResponsesConfig, TrajectoriesConfig
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

RESPONSES = Command(
    name="dlm-prepare responses",
    summary="Let a model answer prompts from JSON lines through its chat template, and add the conversations to "
    'responses.out, which data.source = "chat" trains on. Stopped or killed, it goes on where it was.',
    config=ResponsesConfig,
    flags=(model_flag("model.name", "The model that answers"),),
)

FILLINGS = Command(
    name="dlm-prepare fillings",
    summary="Let a model fill holes in Python files, keep the fills with which the file can still be parsed (the likeliest, by "
    "fillings.judge), and add their traces to fillings.store, which data.source = traces trains on. Stopped or killed, it "
    "goes on where it was.",
    config=FillingsConfig,
    flags=(model_flag("model.name", "The model that fills"),),
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


def _responses(config: ResponsesConfig, options: Options) -> None:
    from pathlib import Path

    from dlm.prepare.responses import respond, unfinished_file

    done, out = respond(config), Path(config.responses.out)
    speed = f", {done.tokens:,} tokens in {done.seconds:,.0f} s" if done.tokens else ""
    print(f"{out}: {done.answers} answers to {done.prompts} prompts, {done.made} of them made now{speed}")
    if done.unfinished:
        print(f"{unfinished_file(out)}: {done.unfinished} that reached the limit before their end")


def _fillings(config: FillingsConfig, options: Options) -> None:
    from dlm.prepare.fillings import fill

    done = fill(config)
    print(
        f"{config.fillings.store}: {done.kept} of {done.holes} holes have a fill that holds, {done.made} traces made now"
    )


def _anchors(config: TrainConfig, options: Options) -> None:
    from dlm.training.anchors import write_anchors

    done = write_anchors(config)
    print(
        f"{config.align.anchors or config.draft.states}: the states of {done.sequences} sequences, {done.written} of them written now"
    )


SUBCOMMANDS: Subcommands = {
    "trajectories": (TRAJECTORIES, _trajectories),
    "responses": (RESPONSES, _responses),
    "fillings": (FILLINGS, _fillings),
    "anchors": (ANCHORS, _anchors),
}


def main(argv: Sequence[str] | None = None) -> int:
    return run_subcommand("dlm-prepare", "Make beforehand what a training run then reads.", SUBCOMMANDS, argv)


if __name__ == "__main__":
    raise SystemExit(main())
