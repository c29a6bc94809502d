"""The training loop, on accelerate: one process, DDP, FSDP2 or DeepSpeed by `accelerate launch`. Knows no command line."""

import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dlm import config as toml
from dlm.data.loader import BatchLoader
from dlm.data.source import build_stream
from dlm.errors import UserError
from dlm.models.lm import LM
from dlm.models.transformer import Transformer
from dlm.training import checkpoint
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.objective import Objective
from dlm.training.optim import build_optimizers, build_schedules
from dlm.training.report import Report
from dlm.training.signals import StopRequest, sum_over_processes
from dlm.training.start import check_compiler, starting_point
from dlm.training.throughput import flops_a_token
from dlm.training.validate import HeldOut

# Changing these between stop and resume does not change the numbers that a run computes.
FREE = {"log", "checkpoint", "eval", "data.prefetch", "data.cache", "train.gradient_checkpointing"}
FREE |= {f"train.{name}" for name in ("out", "resume", "threads", "device", "save_dtype")}


@dataclass
class TrainResult:
    """What `dlm.train` returns: the folder that `dlm.load` reads, and what the run saw."""

    folder: Path
    steps: int
    losses: list[float] = field(default_factory=list)
    bound: tuple[float, float] | None = None  # nats a token and its standard error
    bits_per_byte: tuple[float, float] | None = None
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
    return Run(config).go()


class Run:
    """One run: what it is made of, and the state that a checkpoint holds."""

    def __init__(self, config: TrainConfig) -> None:
        t = config.train
        self.config, self.out = config, Path(t.out)
        if t.threads:
            torch.set_num_threads(t.threads)
        AcceleratorState._reset_state()  # a notebook's second run may differ in precision; accelerate would refuse
        self.accelerator = Accelerator(
            cpu=t.device == "cpu",
            mixed_precision="bf16" if t.precision == "bf16" else "no",
            log_with=list(config.log.trackers) or None,
            project_dir=str(self.out),
        )
        a = self.accelerator
        set_seed(t.seed)
        self.lm: LM = starting_point(config)
        self.network: Transformer = self.lm.network.to(a.device).train()
        self.network.gradient_checkpointing = t.gradient_checkpointing
        stream = build_stream(config.data, self.lm.tokenizer, t.length, "train", t.seed)
        self.loader = BatchLoader(stream, t.batch_size, a.process_index, a.num_processes, prefetch=config.data.prefetch)
        share = t.batch_size // a.num_processes
        self.micro = t.micro_batch_size or share
        if share % self.micro:
            raise UserError(
                f"train.batch_size = {t.batch_size} over {a.num_processes} processes is {share} sequences each, "
                f"not a multiple of train.micro_batch_size = {self.micro}"
            )
        self.held_out = self._held_out()
        optimizers = build_optimizers(self.network, config.optim, t.lr)
        objective = Objective(self.network, config.objective, t.seed, t.length)
        if t.compile:
            check_compiler(a.device)
            objective.compile_parts()
        self.schedules = build_schedules(optimizers, t)
        self.objective, *self.optimizers = a.prepare(objective, *optimizers)
        self.ema = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(t.ema)) if t.ema else None
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        a.register_for_checkpointing(self)
        self.stop = StopRequest()

    # --- the state that accelerate saves beside model, optimisers and random generators ---------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "data": self.loader.state_dict(),
            "schedules": [s.state_dict() for s in self.schedules],
            "ema": self.ema.state_dict() if self.ema else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.loader.load_state_dict(state["data"])
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        if self.ema:
            self.ema.load_state_dict(state["ema"])

    def save_checkpoint(self) -> None:
        """Write everything a bitwise resumption needs, atomically."""
        a, folder = self.accelerator, self.out / "checkpoints"
        a.wait_for_everyone()
        if a.num_processes == 1:
            checkpoint.publish(folder, self.step, self._write, self.config.checkpoint.keep_last)
            return
        work = folder / f".writing-{self.step:08d}"  # every process writes its part before one of them renames
        self._write(work)
        a.wait_for_everyone()
        if a.is_main_process:
            checkpoint.seal(folder, self.step, work, self.config.checkpoint.keep_last)
        a.wait_for_everyone()

    def _write(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))
        if self.accelerator.is_main_process:
            (folder / "config.json").write_text(json.dumps(self.config.model_dump(mode="json"), indent=1))

    def resume(self) -> None:
        """Go on from the newest checkpoint, if the config allows and there is one."""
        complete = checkpoint.found(self.out / "checkpoints")
        if not complete or not self.config.train.resume:
            return
        extendable = (
            {"train.steps", "train.decay_steps"} if self.config.train.schedule in ("constant", "wsd") else set()
        )
        checkpoint.check_same_run(complete[0], self.config.model_dump(mode="json"), FREE | extendable)
        self.accelerator.load_state(str(complete[0]))

    # --- the run --------------------------------------------------------------------------------------------------

    def go(self) -> TrainResult:
        """Resume, train, validate, save."""
        a, c = self.accelerator, self.config
        if a.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
        self.resume()
        result = TrainResult(self.out, self.step)
        parameters = sum(p.numel() for p in self.network.parameters())
        flops = flops_a_token(self.network.config, parameters, c.train.length)
        with self.stop, Report(c, a, flops, self.step) as report:
            report.say(
                f"{parameters:,} parameters, GEMM ceiling {report.ceiling / 1e9:.0f} GFLOP/s, {c.train.steps} steps"
            )
            while self.step < c.train.steps and not self.stop.anywhere(a):
                started = time.perf_counter()
                parts, norm = self.optimiser_step()
                seconds = time.perf_counter() - started
                self.seconds += seconds
                result.losses.append(sum(parts.values()))
                lr = float(self.schedules[0].get_last_lr()[0])
                report.training(self.step, parts, norm, lr, self.tokens, seconds, self.seconds)
                last = self.step == c.train.steps
                if c.checkpoint.every and (last or self.step % c.checkpoint.every == 0):
                    self.save_checkpoint()
                if self.held_out and (last or (c.eval.every and self.step % c.eval.every == 0)):
                    found = self.held_out.bound(self.averaged, self.lm.require_mask_id(), c.eval.draws)
                    result.bound, result.bits_per_byte = found.per_token, found.bits_per_byte
                    report.validation(self.step, self.tokens, found)
                if c.eval.sample_every and self.step % c.eval.sample_every == 0:
                    self._sample(report)
            if self.stop.name:
                self.save_checkpoint()
                report.say(
                    f"{self.stop.name}: checkpoint of step {self.step} written to {self.out}; run again to go on"
                )
        result.steps, result.stopped_by = self.step, self.stop.name
        if not self.stop.name:
            self._save_final()
        self.loader.close()
        return result

    def optimiser_step(self) -> tuple[dict[str, float], float]:
        """One step over one global batch; the parts of the whole batch's loss, and the gradient norm before clipping."""
        a, t = self.accelerator, self.config.train
        batch = self._batch()
        totals: dict[str, torch.Tensor] = {}
        for start in range(0, len(batch.index), self.micro):
            last = start + self.micro >= len(batch.index)
            exchange: AbstractContextManager = nullcontext() if last else a.no_sync(self.objective)
            with torch.enable_grad(), exchange:
                with a.autocast():
                    parts = self.objective(batch.rows(start, start + self.micro))
                a.backward(
                    sum(parts.values()) * a.num_processes
                )  # data parallel averages gradients; shares must add up
            totals = {name: totals.get(name, 0) + part.detach() for name, part in parts.items()}
        norm = a.clip_grad_norm_(self.network.parameters(), t.clip if t.clip else float("inf"))
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self.step += 1
        self.tokens += t.batch_size * t.length
        if self.ema:
            self.ema.update_parameters(self.network)
        return {name: sum_over_processes(a, total) for name, total in totals.items()}, float(torch.as_tensor(norm))

    def _batch(self) -> Batch:
        try:
            rows = next(self.loader)
        except StopIteration:
            raise UserError(
                f"the data ended after {self.step} steps of {self.config.train.steps}: fewer steps, or more data"
            ) from None
        device = self.accelerator.device
        ids = rows["input_ids"].to(device)
        prompt = rows["prompt_mask"]
        answer = torch.ones_like(ids, dtype=torch.bool) if prompt is None else ~prompt.to(device)
        t = self.config.train
        return Batch(ids, answer, rows["index"].to(device), self.step, t.batch_size, progress=self.step / t.steps)

    # --- looking at it, and the end -------------------------------------------------------------------------------

    @property
    def averaged(self) -> Transformer:
        """The weights that are validated and saved: the averaged ones where there are any."""
        network = self.ema.module if self.ema else self.network
        assert isinstance(network, Transformer)
        return network

    def _held_out(self) -> HeldOut | None:
        e, t = self.config.eval, self.config.train
        if not e.sequences or not self.accelerator.is_main_process:
            return None
        stream = build_stream(self.config.data, self.lm.tokenizer, t.length, "heldout", t.seed)
        sizes = None
        if self.config.data.source != "sudoku" and self.lm.tokenizer is not None:
            sizes = torch.as_tensor(self.lm.tokenizer.token_bytes)
        held_out = HeldOut(stream, e.sequences, e.batch_size, sizes)
        return held_out if held_out.batches else None

    def _sample(self, report: Report) -> None:
        if not self.accelerator.is_main_process:
            return
        import dlm

        lm = LM(self.averaged, self.lm.tokenizer, "training")
        for prompt in self.config.eval.prompts:
            if "[MASK" in prompt:
                found = dlm.infill(lm, [prompt])
            else:
                found = dlm.generate(lm, [prompt], gen_length=self.config.eval.gen_length)
            report.say(f"--- step {self.step}: {prompt!r}\n{found[0].text}")

    def _save_final(self) -> None:
        a = self.accelerator
        a.wait_for_everyone()
        if self.ema is None and a.num_processes > 1:
            weights = a.get_state_dict(self.objective)  # gathers what FSDP or DeepSpeed has spread out
            if a.is_main_process:
                self.network.load_state_dict({k.removeprefix("network."): v for k, v in weights.items()})
        if a.is_main_process:
            final = LM(self.averaged, self.lm.tokenizer, self.lm.name, self.lm.settings, self.lm.generation)
            final.save(self.out, dtype=self.config.train.save_dtype)
        a.wait_for_everyone()
