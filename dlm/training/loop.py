"""The training loop, on accelerate: one process, DDP, FSDP2 or DeepSpeed by `accelerate launch`. Knows no command line."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from accelerate import Accelerator

from dlm import config as toml
from dlm.data.loader import BatchLoader
from dlm.data.source import build_stream
from dlm.errors import UserError
from dlm.models.lm import LM
from dlm.models.subnormals import subnormals_as_zeros
from dlm.models.transformer import Transformer
from dlm.training import adapters, checkpoint, finished, folder, processes, state
from dlm.training.align import build_align
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.objective import Objective
from dlm.training.optim import build_optimizer, build_schedule, lr_factor
from dlm.training.profile import Profile
from dlm.training.replay import ReplayStream
from dlm.training.report import Report
from dlm.training.same import check_same_run
from dlm.training.signals import StopRequest, sum_over_processes
from dlm.training.start import check_compiler, starting_point
from dlm.training.throughput import flops_a_token
from dlm.training.validate import HeldOut
from dlm.training.watch import Epochs, Watch


@dataclass
class TrainResult:
    """What `dlm.train` returns: the folder that `dlm.load` reads, and what the run saw."""

    folder: Path
    steps: int
    losses: list[float] = field(default_factory=list)
    bound: tuple[float, float | None] | None = None  # nats a token and its standard error, which one draw has not
    bits_per_byte: tuple[float, float | None] | None = None
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
        return already(config, a) or Run(config, a).go()


def already(config: TrainConfig, a: Accelerator) -> TrainResult | None:
    """What the run that `config` describes has left, where it is at its last step already; says so."""
    done = finished.look(config) if config.train.resume else None
    if not processes.group(a).all_well(done is not None and (not a.is_main_process or finished.is_whole(done, config))):
        return None
    assert done is not None
    more = "raise train.steps" if config.extendable else "set train.resume = false to train it again"
    say(a, f"already at step {done.step} of {config.train.steps}: nothing to do; {more} or give another train.out")
    return TrainResult(Path(config.train.out), done.step, bound=done.bound, bits_per_byte=done.bits_per_byte)


def say(a: Accelerator, text: str) -> None:
    """A line that every user must see, by the first process."""
    if a.is_main_process:
        print(text, file=sys.stderr, flush=True)


class Run:
    """One run: what it is made of, and the state that a checkpoint holds."""

    @subnormals_as_zeros()
    def __init__(self, config: TrainConfig, accelerator: Accelerator | None = None) -> None:
        t = config.train
        self.config, self.out = config, Path(t.out)
        if t.threads:
            torch.set_num_threads(t.threads)
        a = self.accelerator = accelerator or processes.start(config)
        self.group = processes.group(a)
        self.profile = Profile(config.profile, self.out, a.process_index, t.compile)
        adapters.check(config, a)
        self.lm: LM = starting_point(config)
        adapters.attach(config, self.lm, a.device)
        if a.distributed_type not in processes.SPREAD:
            self.lm.network.to(a.device)
        self.network: Transformer = self.lm.network.train()
        self.network.gradient_checkpointing = t.gradient_checkpointing
        stream = build_stream(config.data, self.lm.tokenizer, t.length, "train", t.seed)
        if config.replay.fraction:
            stream = ReplayStream(stream, config.replay, t.batch_size, t.seed)
        self.loader = BatchLoader(stream, t.batch_size, a.process_index, a.num_processes, prefetch=config.data.prefetch)
        self.micro = processes.micro_batch_size(config, a)
        e, main = config.eval, a.is_main_process
        wanted = config.data, self.lm.tokenizer, t.length, e.sequences, e.batch_size, t.seed
        self.held_out = HeldOut.of(*wanted) if e.sequences and main else None
        self.watch, self.epochs = Watch(config, self.held_out), Epochs(config.watch.epochs)
        self.optimizer = build_optimizer(self.network, config.optim, t.lr, t.ema)
        align = self.align = build_align(config, self.lm, a.device)
        objective = Objective(self.network, config.objective, t.seed, t.length, align)
        objective.ranges = self.profile.ranges
        self.parameters = sum(p.numel() for p in self.network.parameters())
        self.flops_a_token = flops_a_token(self.network.config, self.parameters, t.length, *objective.masking.work)
        objective.ranges.name_layers(self.network.layers)
        if t.compile:
            check_compiler(a.device)
            objective.compile_parts()
        self.schedule = build_schedule(self.optimizer, t)
        self.whole = processes.Whole(a, self.network)
        if config.adapter.kind != "none" and a.distributed_type not in processes.SPREAD:
            adapters.keep_trained(objective)
        self.objective, self.prepared = a.prepare(objective, self.optimizer)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.stop = StopRequest()

    # --- the state that is saved beside model, optimiser and random generators ------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "data": self.loader.state_dict(),
            "schedule": self.schedule.state_dict(),
            "epochs": self.epochs.state_dict(),
            "align": self.align.state_dict() if self.align else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.loader.load_state_dict(state["data"])
        self.schedule.load_state_dict(state["schedule"])
        self.epochs.load_state_dict(state["epochs"])
        if self.align:
            self.align.load_state_dict(state["align"])

    def save_checkpoint(self) -> None:
        """Write everything a bitwise resumption needs, atomically; a UserError if weights are not finite."""
        checkpoint.publish(
            self.out / "checkpoints", self.step, self._write, self.config.checkpoint.keep_last, self.group
        )

    def _write(self, work: Path) -> None:
        a, module = self.accelerator, self.accelerator.unwrap_model(self.objective)
        try:
            state.save(work, a, module, self.optimizer, self.state_dict())
        except state.NotFinite as name:
            raise self._diverged(f"{name} is not finite") from None
        if a.is_main_process:
            (work / "config.json").write_text(json.dumps(self.config.model_dump(mode="json"), indent=1))

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if the config allows and there is one."""
        a, at = self.accelerator, self.out / "checkpoints"
        named = checkpoint.found(at) if self.config.train.resume else []
        processes.agree(a, named, str(self.out))
        newest = checkpoint.newest_whole(at, partial(say, a), self.group) if named else None
        if newest is None:
            return
        check_same_run(newest, self.config)
        self.load_state_dict(state.load(newest, a, a.unwrap_model(self.objective), self.optimizer))
        say(a, f"resuming from step {self.step} of {self.out}")

    # --- the run --------------------------------------------------------------------------------------------------

    @subnormals_as_zeros()
    def go(self) -> TrainResult:
        """Resume, train, validate, save."""
        a, c = self.accelerator, self.config
        if a.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
        self.resume()
        result = TrainResult(self.out, self.step)
        with self.stop, Report(c, a, self.flops_a_token, self.step) as report, self.profile.recording(report.say):
            on_threads = f" on {torch.get_num_threads()} CPU thread(s)" if a.device.type == "cpu" else ""
            report.say(
                f"{self.parameters:,} parameters, GEMM ceiling {report.ceiling / 1e9:.0f} GFLOP/s{on_threads}, "
                f"{c.train.steps} steps"
            )
            while self.step < c.train.steps and not self.stop.anywhere(a):
                started = time.perf_counter()
                parts, norm = self.optimiser_step()
                seconds = time.perf_counter() - started
                self.seconds += seconds
                self.profile.step(self.step)
                if not (math.isfinite(sum(parts.values())) and math.isfinite(norm)):  # the same in every process
                    raise self._diverged(f"the loss is {sum(parts.values())} and the gradient norm {norm}")
                ended = self.epochs.ended(self.loader.epoch, self.tokens, self.seconds)
                result.losses.append(sum(parts.values()))
                lr = float(self.schedule.get_last_lr()[0])
                report.training(self.step, parts, norm, lr, self.tokens, seconds, self.seconds)
                last = self.step == c.train.steps
                if c.checkpoint.every and (last or self.step % c.checkpoint.every == 0):
                    self.save_checkpoint()
                if c.eval.sequences and (last or ended or (c.eval.every and self.step % c.eval.every == 0)):
                    self._validate(report, result)
                if ended:
                    report.epoch(self.step, ended, result.bound)
                if self.watch.due(self.step):
                    self._look(report)
                if c.eval.sample_every and self.step % c.eval.sample_every == 0:
                    self._sample(report)
            if self.stop.name:
                self.save_checkpoint()
                report.say(
                    f"{self.stop.name}: checkpoint of step {self.step} written to {self.out}; run again to go on"
                )
        result.steps, result.stopped_by = self.step, self.stop.name
        if not self.stop.name:
            self._save_final(result)
        self.loader.close()
        return result

    def _diverged(self, what: str) -> UserError:
        t, left = self.config.train, checkpoint.found(self.out / "checkpoints")
        lr = t.lr * lr_factor(self.step - 1, t)
        return UserError(
            f"step {self.step}: {what}, at learning rate {lr:g}: the run has diverged. Lower train.lr (now {t.lr:g})"
            + ("" if t.clip else ", set train.clip = 1")
            + f" or lengthen train.warmup_steps (now {t.warmup_steps}), and give another train.out; "
            + (f"the last checkpoint with finite weights is {left[0]}" if left else "no checkpoint was written before")
        )

    def optimiser_step(self) -> tuple[dict[str, float], float]:
        """One step over one global batch; the parts of the whole batch's loss, and the gradient norm before clipping."""
        a, t, ranges = self.accelerator, self.config.train, self.profile.ranges
        torch.manual_seed(
            crc32(f"{t.seed} {self.step} {a.process_index}".encode())
        )  # dropout, the one thing unaddressed
        with ranges("data"):
            batch = self._batch()
        totals: dict[str, torch.Tensor] = {}
        for start in range(0, len(batch.index), self.micro):
            last = start + self.micro >= len(batch.index)
            with torch.enable_grad(), processes.exchanging(a, self.objective, last):
                with a.autocast(), ranges("forward"):
                    parts = self.objective(batch.rows(start, start + self.micro))
                with ranges("backward"):  # data parallel averages gradients; shares must add up
                    a.backward(sum(parts.values()) * a.num_processes)
            for name, part in parts.items():
                totals[name] = totals.get(name, 0) + part.detach()
        if self.watch.due(self.step + 1):
            self.watch.measure(a.unwrap_model(self.objective), batch)
        with ranges("optimiser"):
            norm = a.clip_grad_norm_(self.network.parameters(), t.clip if t.clip else float("inf"))
            self.prepared.step()
            self.prepared.zero_grad()
            self.schedule.step()
        self.step += 1
        self.tokens += t.batch_size * t.length
        return {name: sum_over_processes(a, total) for name, total in totals.items()}, float(torch.as_tensor(norm))

    def _batch(self) -> Batch:
        try:
            rows = next(self.loader)
        except StopIteration:
            raise UserError(
                f"the data ended after {self.step} steps of {self.config.train.steps}: fewer steps, or more data"
            ) from None
        t = self.config.train
        return Batch.of(rows, self.accelerator.device, self.step, t.steps, t.batch_size)

    # --- looking at it, and the end -------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[Transformer | None]:
        """In the main process the network that is validated and saved, with the averaged weights where there are any.

        None in the others, which must ask for it as well.
        """
        exchange = self.optimizer.exchange if self.config.train.ema else lambda: None
        exchange()
        try:
            yield self.whole(self.objective)
        finally:
            exchange()

    def _validate(self, report: Report, result: TrainResult) -> None:
        with self.averaged() as network:
            if network is not None and self.held_out is not None:
                found = self.held_out.bound(network, self.config.eval.draws)
                result.bound, result.bits_per_byte = found.per_token, found.bits_per_byte
                report.validation(self.step, self.tokens, found)

    def _look(self, report: Report) -> None:
        with self.averaged() as network:
            if network is not None:
                self.watch.look(LM(network, self.lm.tokenizer, "training"), report, self.step)

    def _sample(self, report: Report) -> None:
        import dlm

        with self.averaged() as network:
            if network is None:
                return
            lm = LM(network, self.lm.tokenizer, "training")
            for prompt in self.config.eval.prompts:
                try:
                    if "[MASK" in prompt:
                        found = dlm.infill(lm, [prompt])
                    else:
                        found = dlm.generate(lm, [prompt], gen_length=self.config.eval.gen_length)
                except UserError as error:  # a sample that cannot be made, say one beyond the context, ends no run
                    report.say(f"--- step {self.step}: {prompt!r}: {error}")
                    continue
                report.say(f"--- step {self.step}: {prompt!r}\n{found[0].text}")

    def _save_final(self, result: TrainResult) -> None:
        failure = None
        with self.averaged() as network:
            try:
                if network is not None:
                    self._write_final(network, result)
            except UserError as error:
                failure = error
        if not self.group.all_well(failure is None):
            raise failure or UserError("the main process could not write the model: its message says why")

    def _write_final(self, network: Transformer, result: TrainResult) -> None:
        if name := state.not_finite(network):
            raise self._diverged(f"{name} is not finite")
        final = LM(network, self.lm.tokenizer, self.lm.name, self.lm.settings, self.lm.generation)
        with folder.writing(self.out):
            adapters.save(self.config, final, self.out)
            finished.note(self.config, self.step, result.bound, result.bits_per_byte)
