"""Stopped anywhere and resumed, a run is bitwise the run that never stopped; a torn checkpoint is never picked up."""

import json
import os
import signal
import subprocess
import sys
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


@pytest.mark.parametrize(
    "options", [{}, {"train__ema": "0.9", "data__pack": "row", "data__prefetch": "2"}], ids=["plain", "ema"]
)
def test_resuming_at_any_step_is_bitwise_the_run_that_never_stopped(tmp_path, options):
    never = Run(config(tmp_path, "never", **options))
    straight = advance(never, 8)
    for stop in (1, 4, 7):
        first = Run(config(tmp_path, f"stop{stop}", **options))
        losses = advance(first, stop)
        first.save_checkpoint()
        torch.rand(3)  # a resumed run must not depend on what the process drew
        second = Run(config(tmp_path, f"stop{stop}", **options))
        second.resume()
        losses += advance(second, 8 - stop)
        assert losses == straight
        assert all(torch.equal(a, b) for a, b in zip(weights(never).values(), weights(second).values(), strict=True))
        with never.averaged() as a, second.averaged() as b:
            assert all(torch.equal(x, y) for x, y in zip(a.network.parameters(), b.network.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_streamed_dataset_resumes_with_its_shuffle_buffer(tmp_path, kind):
    data = tmp_path / f"rows.{kind}"
    if kind == "json":
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    else:  # columns that nobody reads, of types that JSON has not
        beside = {"when": [datetime(2026, 1, 1)] * len(TEXTS), "blob": [b"\xff\x00"] * len(TEXTS)}
        datasets.Dataset.from_dict({"text": TEXTS, **beside}).to_parquet(data)
    options = {
        "data__source": "datasets",
        "data__dataset": kind,
        "data__paths": json.dumps([str(data)]),
        "data__streaming": "true",
        "data__shuffle_buffer": "20",
        "data__heldout_fraction": "0",
        "eval__sequences": "0",
    }
    straight = advance(Run(config(tmp_path, "never", **options)), 6)
    first = Run(config(tmp_path, "stopped", **options))
    losses = advance(first, 3)
    first.save_checkpoint()
    second = Run(config(tmp_path, "stopped", **options))
    second.resume()
    assert losses + advance(second, 3) == straight


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


SAVER = """
import sys, time
from pathlib import Path
from dlm.training import checkpoint
folder = Path(sys.argv[1])
def write(work):
    for part in range(20):
        (work / f"part{part}").write_bytes(bytes([part]) * 200_000)
        print(part, flush=True)
        time.sleep(0.01)
step = 0
while True:
    step += 1
    checkpoint.publish(folder, step, write, keep_last=2)
    print("published", step, flush=True)
"""


@pytest.mark.parametrize("at", [3, 25, 33, 50])
def test_kill_9_while_saving_leaves_the_previous_checkpoint_whole(tmp_path, at):
    process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    published = 0
    for _ in range(at):
        line = process.stdout.readline()
        if line.startswith("published"):
            published = int(line.split()[1])
    process.kill()
    process.communicate()
    complete = checkpoint.found(tmp_path)
    assert [p.name for p in complete[:1]] == ([f"step-{published:08d}"] if published else []) or complete[
        0
    ].name > f"step-{published:08d}"
    for folder in complete:
        assert [(folder / f"part{p}").read_bytes() == bytes([p]) * 200_000 for p in range(20)] == [True] * 20


def test_a_run_killed_while_saving_resumes_from_the_previous_checkpoint(tmp_path):
    run = Run(config(tmp_path))
    advance(run, 2)
    run.save_checkpoint()
    torn = tmp_path / "run" / "checkpoints" / ".writing-00000003"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half of it")
    again = Run(config(tmp_path))
    again.resume()
    assert again.step == 2
    advance(again, 1)
    again.save_checkpoint()
    assert sorted(p.name for p in torn.parent.iterdir()) == ["step-00000002", "step-00000003"]


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


def test_kill_9_of_a_real_run_and_resume(tmp_path):
    """A process that trains with a checkpoint a step is killed while it saves; what it left goes on to the same end."""
    straight = train(config(tmp_path, "straight"))
    cfg = config(tmp_path, "killed", checkpoint__every="1")
    # Five files and two folders are flushed each time: this is in the middle of the third.
    assert killed.run(cfg, at=2 * 7 + 4) == -signal.SIGKILL
    folder = tmp_path / "killed" / "checkpoints"
    assert [p.name for p in checkpoint.found(folder)] == ["step-00000002", "step-00000001"]
    assert (folder / ".writing-00000003" / "manifest.json").exists()
    assert train(cfg).losses == straight.losses[2:]
    assert not list(folder.glob(".*"))
