"""`dlm.train`, from top to bottom: steps until the last one or a signal, and between them whatever is due."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dlm import config as toml
from dlm.errors import UserError
from dlm.models.subnormals import subnormals_as_zeros
from dlm.training import folder, processes, state
from dlm.training.config import TrainConfig
from dlm.training.report import Report
from dlm.training.run import Run
from dlm.training.stop import StopRequest
from dlm.training.trainable import Trainable


@dataclass
class TrainResult:
    """What `dlm.train` returns: the folder that `dlm.load` reads, and what the run saw."""

    folder: Path
    steps: int
    losses: list[float] = field(default_factory=list)
    bound: tuple[float, float | None] | None = None  # nats a token and its standard error, which one draw has not
    bits_per_byte: tuple[float, float | None] | None = None
    figures: dict[str, float] = field(
        default_factory=dict
    )  # other results of the last validation, such as a draft's tau
    stopped_by: str | None = None  # the signal that ended the run early


def train(config: TrainConfig | str | Path | dict[str, Any]) -> TrainResult:
    """Train as `config` says, going on from the newest checkpoint in `train.out`; what `dlm-train` calls.

    `config` may also be a TOML file, the name of a shipped one, or a nested dict. SIGINT and SIGTERM finish the step,
    write a checkpoint and return with `stopped_by` set. The final model is written into `train.out` itself, beside
    metrics.jsonl and checkpoints/.
    """
    if isinstance(config, dict):
        config = toml.check(TrainConfig, config, "dlm.train()")
    elif not isinstance(config, TrainConfig):
        config = toml.load(TrainConfig, [config])
    a = processes.start(config)
    with processes.claimed(a, config):
        return already(config, a) or go(Run(config, a))


def already(config: TrainConfig, a: Accelerator) -> TrainResult | None:
    """The result of a run that is already at its last step, with a message; None if there is something to train."""
    done = folder.finished(config) if config.train.resume else None
    whole = done is not None and (not a.is_main_process or folder.is_whole(done, config))
    if not processes.group(a).all_well(whole):
        return None
    assert done is not None
    more = "raise train.steps" if config.extendable else "set train.resume = false to train it again"
    at = f"already at step {done.step} of {config.train.steps}"
    processes.say(a, f"{at}: nothing to do; {more} or give another train.out")
    return TrainResult(Path(config.train.out), done.step, bound=done.bound, bits_per_byte=done.bits_per_byte)


@subnormals_as_zeros()
def go(run: Run) -> TrainResult:
    """Resume, train, validate, save."""
    a, c, stop = run.accelerator, run.config, StopRequest()
    if a.is_main_process:
        run.out.mkdir(parents=True, exist_ok=True)
    run.resume()
    result = TrainResult(run.out, run.step)
    report = Report(c, a, run.flops_a_token, run.step)
    with stop, run.loader, report, run.profile.recording(report.say):
        report.begin(run.parameters)
        if a.device.type == "cuda":  # on a CPU nobody counts what is free for it
            report.say(str(run.memory()))
        while run.step < c.train.steps and not stop.anywhere(a):
            started = time.perf_counter()
            parts, norm = run.optimiser_step()
            seconds = time.perf_counter() - started
            run.seconds += seconds
            run.profile.step(run.step)
            loss = sum(parts.values())
            if not (math.isfinite(loss) and math.isfinite(norm)):  # the same in every process
                raise run.diverged(f"the loss is {loss} and the gradient norm {norm}")
            result.losses.append(loss)
            lr = float(run.schedule.get_last_lr()[0])
            report.training(run.step, parts, norm, lr, run.tokens, seconds, run.seconds)
            between_steps(run, report, result)
        if stop.name:
            run.save_checkpoint()
            report.say(f"{stop.name}: checkpoint of step {run.step} written to {run.out}; run again to go on")
    result.steps, result.stopped_by = run.step, stop.name
    if not stop.name:
        save_final(run, result)
    return result


def between_steps(run: Run, report: Report, result: TrainResult) -> None:
    """What is due after this step: a checkpoint, a validation, the end of an epoch, a snapshot, samples."""
    c, step = run.config, run.step
    last, ended = step == c.train.steps, run.epochs.ended(run.loader.epoch, run.tokens, run.seconds)

    def due(every: int) -> bool:
        return every > 0 and step % every == 0

    if due(c.checkpoint.every) or (last and c.checkpoint.every):
        run.save_checkpoint()
    if c.eval.sequences and (last or ended or due(c.eval.every)):
        with run.averaged() as model:
            if model is not None and run.held_out is not None:
                validate(run, model, report, result)
    if ended:
        report.epoch(step, ended, result.bound)
    if run.watch.due(step):
        with run.averaged() as model:
            if model is not None:
                run.watch.snapshot(model, report, step)
    if due(c.eval.sample_every):
        with run.averaged() as model:
            for prompt in c.eval.prompts:
                if model is None:
                    continue
                try:
                    report.say(f"--- step {step}: {prompt!r}\n{model.sample(prompt, c.eval.gen_length)}")
                except UserError as error:  # a sample that cannot be made, say one beyond the context, ends no run
                    report.say(f"--- step {step}: {prompt!r}: {error}")


def validate(run: Run, model: Trainable, report: Report, result: TrainResult) -> None:
    """The bound of the held-out sequences, and the model's other figures of them."""
    assert run.held_out is not None
    if model.likelihood:
        found = run.held_out.bound(model, run.config.eval.draws)
        result.bound, result.bits_per_byte = found.per_token, found.bits_per_byte
        report.validation(run.step, run.tokens, found)
    figures, text = model.figures(run.held_out)
    if figures:
        result.figures = figures
        report.figures(run.step, run.tokens, figures, text)


def save_final(run: Run, result: TrainResult) -> None:
    """Write the model, and the note that the run is finished; an error of the main process ends all of them."""
    failure = None
    with run.averaged() as model:
        try:
            if model is not None:
                if name := state.not_finite(model.network.named_parameters()):
                    raise run.diverged(f"{name} is not finite")
                with folder.writing(run.out):
                    model.save(run.config)
                    folder.note(run.config, run.step, result.bound, result.bits_per_byte)
        except UserError as error:
            failure = error
    if not run.group.all_well(failure is None):
        raise failure or UserError("the main process could not write the model: its message says why")
