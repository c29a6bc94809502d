"""Stopped anywhere and resumed, a run is bitwise the run that never stopped; a torn checkpoint is never picked up."""

import json
import os
import signal
from datetime import datetime

import datasets
import pytest
import torch

import dlm
from dlm.errors import UserError
from dlm.training import checkpoint
from dlm.training.loop import go, train
from dlm.training.run import Run
from tests.training import killed
from tests.training.runs import TEXTS, config, rows


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in run.network.state_dict().items()}


def advance(run: Run, steps: int) -> list[float]:
    return [run.optimiser_step()[0] for _ in range(steps)]


def resumes(folder, options, stops=(1, 4, 7)):
    """Eight steps in one go are those of runs that are saved after some of them and resumed."""
    never = Run(config(folder, "never", **options))
    straight = advance(never, 8)
    for stop in stops:
        first = Run(config(folder, f"stop{stop}", **options))
        losses = advance(first, stop)
        first.save_checkpoint()
        torch.rand(3)  # a resumed run must not depend on what the process drew
        second = Run(config(folder, f"stop{stop}", **options))
        second.resume()
        losses += advance(second, 8 - stop)
        assert losses == straight
        assert all(torch.equal(a, b) for a, b in zip(weights(never).values(), weights(second).values(), strict=True))
        with never.averaged() as a, second.averaged() as b:
            assert all(torch.equal(x, y) for x, y in zip(a.network.parameters(), b.network.parameters(), strict=True))


REPLAY = {"replay__fraction": "0.5", "replay__size": "6", "eval__sequences": "0"}
RUNS = {"plain": {}, "ema": {"train__ema": "0.9", "data__pack": "row", "data__prefetch": "2"}}
RUNS |= {"replay": REPLAY, "replay, read ahead": {**REPLAY, "data__prefetch": "2"}}


@pytest.mark.parametrize("name", RUNS)
def test_resuming_at_any_step_is_bitwise_the_run_that_never_stopped(tmp_path, name):
    resumes(tmp_path, RUNS[name])


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_streamed_dataset_resumes_with_its_shuffle_buffer(tmp_path, kind):
    data = tmp_path / f"rows.{kind}"
    if kind == "json":
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    else:  # columns that nobody reads, of types that JSON has not
        beside = {"when": [datetime(2026, 1, 1)] * len(TEXTS), "blob": [b"\xff\x00"] * len(TEXTS)}
        datasets.Dataset.from_dict({"text": TEXTS, **beside}).to_parquet(data)
    options = {"data__source": "datasets", "data__dataset": kind, "data__paths": json.dumps([str(data)])}
    options |= {"data__streaming": "true", "data__shuffle_buffer": "20", "data__heldout_fraction": "0"}
    options |= {"eval__sequences": "0"}
    resumes(tmp_path, options, stops=(3,))


def test_a_signal_saves_and_the_next_run_goes_on(tmp_path):
    straight = train(config(tmp_path, "straight"))
    cfg = config(tmp_path, "signalled")
    run = Run(cfg)
    step = run.optimiser_step

    def interrupted():
        found = step()
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    run.optimiser_step = interrupted
    first = go(run)
    assert (first.steps, first.stopped_by) == (3, "SIGTERM")
    second = train(cfg)
    assert first.losses + second.losses == straight.losses
    assert [r["step"] for r in rows(tmp_path / "signalled") if "loss" in r] == list(range(1, 9))
    a, b = dlm.load(tmp_path / "straight"), dlm.load(tmp_path / "signalled")
    assert all(torch.equal(x, y) for x, y in zip(a.network.parameters(), b.network.parameters(), strict=True))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_only_the_last_checkpoints_are_kept(tmp_path):
    train(config(tmp_path, checkpoint__every="2", checkpoint__keep_last="2"))
    assert [p.name for p in checkpoint.found(tmp_path / "run" / "checkpoints")] == ["step-00000008", "step-00000006"]


def test_another_config_is_not_resumed_and_free_settings_are(tmp_path):
    run = Run(config(tmp_path))
    advance(run, 1)
    run.save_checkpoint()
    with pytest.raises(UserError, match=r"train\.lr = 0\.001, but now train\.lr = 0\.002.*train\.resume = false"):
        Run(config(tmp_path, train__lr="0.002")).resume()
    Run(config(tmp_path, log__every="5", checkpoint__keep_last="1")).resume()
    fresh = Run(config(tmp_path, train__lr="0.002", train__resume="false"))
    fresh.resume()
    assert fresh.step == 0


def test_a_warm_up_stable_decay_run_can_be_extended(tmp_path):
    options = {"train__schedule": "wsd", "train__decay_steps": "2"}
    run = Run(config(tmp_path, **options))
    advance(run, 5)
    run.save_checkpoint()
    longer = Run(config(tmp_path, train__steps="12", **options))
    longer.resume()
    assert longer.step == 5 and [round(longer.schedule.get_last_lr()[0], 6)] == [0.001]


@pytest.mark.parametrize(("at", "whole"), [(2 * 7 + 1, 2), (2 * 7 + 4, 2), (3 * 7, 3)])
def test_kill_9_of_a_real_run_and_resume(tmp_path, at, whole):
    """A process that trains with a checkpoint a step is killed while it saves; what it left goes on to the same end."""
    straight = train(config(tmp_path, "straight"))
    cfg = config(tmp_path, "killed", checkpoint__every="1")
    # Five files and two folders are flushed each time: this is in the third, the last of them in its place already.
    assert killed.run(cfg, at) == -signal.SIGKILL
    folder = tmp_path / "killed" / "checkpoints"
    assert checkpoint.step_of(checkpoint.found(folder)[0]) == whole
    assert (folder / ".writing-00000003").exists() == (whole == 2)
    assert train(cfg).losses == straight.losses[whole:]
    assert not list(folder.glob(".*"))
