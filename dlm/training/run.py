"""`Run`: a training run with its optimiser step, its checkpoints, and its averaged weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR

from dlm.data.loader import BatchLoader
from dlm.data.source import build_stream
from dlm.errors import UserError
from dlm.models.subnormals import subnormals_as_zeros
from dlm.training import checkpoint, folder, footprint, processes, state, trainable
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.language import LanguageModel
from dlm.training.optim import build_optimizer, lr_factor
from dlm.training.profile import Profile
from dlm.training.rehearsal import RehearsalStream
from dlm.training.trainable import Trainable
from dlm.training.validate import HeldOut
from dlm.training.watch import Epochs, Watch


class Run:
    """The run that `config` describes, ready for its first step or for `resume`."""

    @subnormals_as_zeros()
    def __init__(self, config: TrainConfig, accelerator: Accelerator | None = None) -> None:
        t, e = config.train, config.eval
        self.config, self.out = config, Path(t.out)
        if t.threads:
            torch.set_num_threads(t.threads)
        a = self.accelerator = accelerator or processes.start(config)
        self.group = processes.group(a)
        self.profile = Profile(config.profile, self.out, a.process_index, t.compile)

        self.model: Trainable = trainable.start(config, a)
        self.network = self.model.network.train()
        if a.distributed_type not in processes.SPREAD:
            self.network.to(a.device)
        self.parameters = sum(p.numel() for p in self.network.parameters())
        self.flops_a_token = self.model.flops_a_token()

        stream = build_stream(config.data, self.model.tokenizer, t.length, "train", t.seed)
        if config.replay.fraction:
            stream = RehearsalStream(stream, config.replay, t.batch_size, t.seed)
        self.loader = BatchLoader(stream, t.batch_size, a.process_index, a.num_processes, prefetch=config.data.prefetch)
        self.micro = processes.micro_batch_size(config, a)
        held = config.data, self.model.tokenizer, t.length, e.sequences, e.batch_size, t.seed
        self.held_out = HeldOut.of(*held) if e.sequences and a.is_main_process else None
        self.watch, self.epochs = Watch(config, self.held_out), Epochs(config.watch.epochs)

        bf16 = t.precision == "bf16"
        self.optimizer = build_optimizer(self.network, self.model.matrices(), config.optim, t.lr, t.ema, bf16)
        objective = self.model.objective(self.profile.ranges)
        if t.compile:
            processes.check_compiler(a.device)
            self.model.compile(objective)
        self.schedule = LambdaLR(self.optimizer, lambda step: lr_factor(step, t))
        self.whole = processes.Whole(a, self.model)
        self.objective, self.prepared = a.prepare(objective, self.optimizer)
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def memory(self) -> footprint.TrainingMemory:
        """What a step needs on this process's device; see `footprint.plan`."""
        t, positions = self.config.train, self.config.train.length
        if isinstance(self.model, LanguageModel):
            positions = round(positions * self.model.masking.work[0])
        return footprint.plan(
            self.network,
            self.optimizer.param_groups,
            sequences=self.micro,
            positions=positions,
            bf16=t.precision == "bf16",
            average=bool(t.ema),
            shards=self.accelerator.num_processes if self.accelerator.distributed_type in processes.SPREAD else 1,
        )

    def optimiser_step(self) -> tuple[dict[str, float], float]:
        """One step over one global batch; the parts of the whole batch's loss, and the gradient norm before clipping."""
        a, t, ranges = self.accelerator, self.config.train, self.profile.ranges
        # For dropout, and for objectives whose random numbers have no addresses.
        set_seed(crc32(f"{t.seed} {self.step} {a.process_index}".encode()))
        with ranges("data"):
            batch = self._batch()
            if (share := self.model.total(batch)) is not None:
                batch = replace(batch, total=processes.sum_over_processes(a, share))
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
            self.watch.measure(self.model, batch)
        with ranges("optimiser"):
            norm = a.clip_grad_norm_(self.network.parameters(), t.clip if t.clip else float("inf"))
            self.prepared.step()
            self.prepared.zero_grad()
            self.schedule.step()
        self.step += 1
        self.tokens += t.batch_size * t.length
        sums = {name: processes.sum_over_processes(a, total) for name, total in totals.items()}
        return sums, float(torch.as_tensor(norm))

    def _batch(self) -> Batch:
        try:
            rows = next(self.loader)
        except StopIteration:
            raise UserError(
                f"the data ended after {self.step} steps of {self.config.train.steps}: fewer steps, or more data"
            ) from None
        t = self.config.train
        return Batch.of(rows, self.accelerator.device, self.step, t.steps, t.batch_size)

    def diverged(self, what: str) -> UserError:
        """The error of a run whose numbers are no longer finite; `what` says which."""
        t, left = self.config.train, checkpoint.found(self.out / "checkpoints")
        lr = t.lr * lr_factor(self.step - 1, t)
        return UserError(
            f"step {self.step}: {what}, at learning rate {lr:g}: the run has diverged. Lower train.lr (now {t.lr:g})"
            + ("" if t.clip else ", set train.clip = 1")
            + f" or lengthen train.warmup_steps (now {t.warmup_steps}), and give another train.out; "
            + (f"the last checkpoint with finite weights is {left[0]}" if left else "no checkpoint was written before")
        )

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Write everything that a bitwise resumption needs, atomically; a UserError if weights are not finite."""
        at, keep = self.out / "checkpoints", self.config.checkpoint.keep_last
        checkpoint.publish(at, self.step, self._write, keep, self.group)

    def _write(self, work: Path) -> None:
        a = self.accelerator
        own = {name: getattr(self, name) for name in ("step", "tokens", "seconds")} | self.model.state_dict()
        own |= {"data": self.loader.state_dict(), "schedule": self.schedule.state_dict()}
        own |= {"epochs": self.epochs.state_dict()}
        try:
            state.save(work, a, a.unwrap_model(self.objective), self.optimizer, own)
        except state.NotFinite as name:
            raise self.diverged(f"{name} is not finite") from None
        if a.is_main_process:
            (work / "config.json").write_text(json.dumps(self.config.model_dump(mode="json"), indent=1))

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if the config allows and there is one."""
        a, at = self.accelerator, self.out / "checkpoints"
        named = checkpoint.found(at) if self.config.train.resume else []
        processes.agree(a, named, str(self.out))
        newest = checkpoint.newest_whole(at, partial(processes.say, a), self.group) if named else None
        if newest is None:
            return
        folder.check_same_run(newest, self.config)
        own = state.load(newest, a, a.unwrap_model(self.objective), self.optimizer)
        self.step, self.tokens, self.seconds = own["step"], own["tokens"], own["seconds"]
        self.loader.load_state_dict(own["data"])
        self.schedule.load_state_dict(own["schedule"])
        self.epochs.load_state_dict(own["epochs"])
        self.model.load_state_dict(own)
        processes.say(a, f"resuming from step {self.step} of {self.out}")

    # --- what is validated, shown and saved: the averaged weights, where there are any ----------------------------

    @contextmanager
    def averaged(self) -> Iterator[Trainable | None]:
        """The model with its averaged weights in the main process; None in the others, which must enter this too."""
        exchange = self.optimizer.exchange if self.config.train.ema else lambda: None
        exchange()
        try:
            yield self.whole(self.objective)
        finally:
            exchange()
