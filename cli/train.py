"""`dlm-train`: train a diffusion language model, or prepare its data, as a config says. Knows no algorithm."""

import json
import os
import shlex
import sys
from collections.abc import Sequence

from dlm.errors import UserError
from dlm.training.config import TrainConfig

from .flags import Flag, model_flag
from .options import Command, Options

COMMAND = Command(
    name="dlm-train",
    summary="Train a diffusion language model on the data a config names. Stopped or killed, it resumes where it was.",
    config=TrainConfig,
    flags=(
        model_flag("train.init_from", "Start from this model's weights"),
        Flag("--prepare", "FOLDER", "Only write the data as tokenised Parquet shards into FOLDER, and stop."),
        Flag(
            "--launch",
            "HOW",
            "Train on all GPUs of this machine: ddp, fsdp2, deepspeed-zero2, deepspeed-zero3, or a file of accelerate's.",
        ),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    return COMMAND.run(_work, argv)


def _work(config: TrainConfig, options: Options) -> None:
    folder, how = options.value("--prepare"), options.value("--launch")
    if folder is not None:
        _prepare(config, folder)
    elif how is not None:
        from dlm.training.launch import launch

        files = [word for file in options.files for word in ("--config", file)]
        launch(how, [*files, *(f"--{key}={text}" for key, text in options.overrides.items())])
    else:
        import dlm

        speaks = os.environ.get("RANK", "0") == "0"
        if speaks and config.log.progress and config.tokenizer != config.train.tokenizer:
            print(f"train.tokenizer is not set: taking that of {config.tokenizer}", file=sys.stderr, flush=True)
        result = dlm.train(config)
        if speaks and result.stopped_by is None:
            folder = str(result.folder)
            print(f"{folder}: the model after {result.steps} steps; load it with dlm.load({folder!r})")
            if config.data.source != "sudoku":
                print(f"try it: dlm-infer --model {shlex.quote(folder)} --prompt 'some text'", file=sys.stderr)


def _prepare(config: TrainConfig, folder: str) -> None:
    from dlm.data.preparing import prepare
    from dlm.data.tokenizer import load_tokenizer
    from dlm.models.finding import find_tokenizer

    t = config.train
    name = config.tokenizer or t.init_from
    if name is None:
        raise UserError(
            "--prepare needs train.tokenizer: a bundled model's (pico), a folder (dlm-tokenizer makes one) or a hub id"
        )
    tokenizer = load_tokenizer(find_tokenizer(name))
    if t.init_from is not None and config.objective.masking != "causal":
        tokenizer = tokenizer.with_mask()  # as training from an autoregressive model will see it
    manifest = prepare(config.data, tokenizer, folder, t.length, t.seed)
    print(f"{folder}: {json.dumps(manifest['splits'])}")


if __name__ == "__main__":
    raise SystemExit(main())
