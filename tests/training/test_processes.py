"""Two processes on the CPU, started by `accelerate launch` with the shipped files: the numbers of one, exactly resumed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dlm
from dlm.config import to_toml
from dlm.errors import UserError
from dlm.training import processes
from dlm.training.loop import train
from tests.refusals import refused
from tests.training.pair import STEPS, STOP
from tests.training.runs import config, rows

ROOT = Path(__file__).resolve().parents[2]


def launch(kind: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in two processes."""
    files = ROOT / "configs" / "accelerate" / f"{kind}.yaml"
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(files), "--num_processes", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*start, *command], capture_output=True, text=True, timeout=900, env=environment, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "adapter"), [("cpu-2", "none"), ("fsdp2", "none"), ("fsdp2", "lora")])
def test_two_processes_give_the_losses_of_one_and_resume_exactly(tmp_path, kind, adapter):
    # Micro-batches of one row, some of which ask for nothing; Muon; averaged weights.
    options = {"train__steps": str(STEPS), "train__micro_batch_size": "1", "train__ema": "0.9"}
    if adapter == "lora":
        pytest.importorskip("peft", reason="needs the extra `qlora`: peft")
        base = train(config(tmp_path, "base", train__steps="2", eval__sequences="0"))
        options |= {"adapter__kind": "lora", "train__init_from": str(base.folder)}
    alone = train(config(tmp_path, "alone", **options))
    (tmp_path / "straight.toml").write_text(to_toml(config(tmp_path, "straight", **options)))
    done = launch(kind, "-m", "tests.training.pair", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    straight, stopped = rows(tmp_path / "straight"), rows(tmp_path / "stopped")
    losses = [r["loss"] for r in straight if "loss" in r]
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    norms, of_one = ([r["grad_norm"] for r in told if "loss" in r] for told in (straight, rows(tmp_path / "alone")))
    assert norms == pytest.approx(of_one, rel=1e-4)
    assert [r["bound"] for r in straight if "bound" in r] == pytest.approx([alone.bound[0]], rel=1e-5)
    assert [r["loss"] for r in stopped if "loss" in r] == losses[STOP:]
    one, two, again = (dlm.load(tmp_path / name).network for name in ("alone", "straight", "stopped"))
    for a, b, c in zip(one.parameters(), two.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert torch.equal(b, c)
    parts = {f.name for f in (tmp_path / "stopped" / "checkpoints").glob("*/*.safetensors")}
    places = ("-0-of-2", "-1-of-2") if kind == "fsdp2" else ("",)  # data parallel: one process writes all
    assert parts == {f"{name}{place}.safetensors" for name in ("model", "optimizer") for place in places}


@pytest.mark.slow
def test_two_processes_that_share_compiled_layers_give_the_losses_of_one(tmp_path):
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler")
    options = {"train__steps": "3", "optim__hidden__algorithm": "adamw", "eval__sequences": "0"}
    alone = train(config(tmp_path, "alone", **options))
    (tmp_path / "straight.toml").write_text(to_toml(config(tmp_path, "straight", train__compile="true", **options)))
    done = launch("fsdp2", "-m", "tests.training.compiled", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [r["loss"] for r in rows(tmp_path / "straight") if "loss" in r]
    assert losses == pytest.approx(alone.losses, rel=1e-5) and losses[0] != losses[2]
    graphs = [int(file.read_text()) for file in tmp_path.glob("graphs-*")]
    # FSDP gathers a layer's weights before it and drops them after it, so that each layer has a graph of its own.
    assert len(graphs) == 2 and min(graphs) >= 2
    one, two = (dlm.load(tmp_path / name).network for name in ("alone", "straight"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "weighting"), [("cpu-2", "decay"), ("cpu-2", "dpace"), ("fsdp2", "decay")])
def test_two_processes_train_a_draft_as_one_does(tmp_path, kind, weighting):
    # Rows differ in what they ask for: means of means would differ from the mean.
    base = train(config(tmp_path, "ar", objective__masking="causal", eval__sequences="0")).folder
    options = {"objective__masking": "draft", "draft__target": str(base), "draft__weighting": weighting}
    options |= {
        "train__steps": str(STEPS),
        "train__micro_batch_size": "1",
        "draft__num_anchors": "6",
        "data__pack": "row",
    }
    options |= {"draft__tau_length": "8", "draft__tau_prompts": "2", "draft__vocabulary": "40"}
    alone = train(config(tmp_path, "alone", **options))
    (tmp_path / "straight.toml").write_text(to_toml(config(tmp_path, "straight", **options)))
    done = launch(kind, "-m", "tests.training.pair", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    straight = rows(tmp_path / "straight")
    losses = [r["loss"] for r in straight if "loss" in r]
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    assert [r["loss"] for r in rows(tmp_path / "stopped") if "loss" in r] == losses[STOP:]
    taus = [[r["tau"] for r in run if "tau" in r] for run in (straight, rows(tmp_path / "alone"))]
    assert taus[0] == taus[1] and taus[0]
    target = dlm.load(str(base))
    one, two = (dlm.load_draft(tmp_path / name, target) for name in ("alone", "straight"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_processes_share_a_latent_model_as_one_holds_it(tmp_path):
    own = {"trainable__kind": "latent", "train__steps": str(STEPS), "train__micro_batch_size": "1"}
    own |= {"trainable__own__channels": "8", "trainable__own__autoencoder__hidden_size": "16"}
    alone = train(config(tmp_path, "alone", **own))
    (tmp_path / "straight.toml").write_text(to_toml(config(tmp_path, "straight", **own)))
    done = launch("fsdp2", "-m", "tests.training.pair", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    straight = rows(tmp_path / "straight")
    losses = [r["loss"] for r in straight if "loss" in r]
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    assert [r["loss"] for r in rows(tmp_path / "stopped") if "loss" in r] == losses[STOP:]
    right = [[r["right/0"] for r in run if "right/0" in r] for run in (straight, rows(tmp_path / "alone"))]
    assert right[0] == right[1] and right[0]


@pytest.mark.slow
def test_all_processes_stop_at_a_loss_that_is_not_finite(tmp_path):
    # What the first step leaves is finite, and infinite in the second.
    options = {"train__lr": "1e30", "train__warmup_steps": "0", "checkpoint__every": "1", "eval__sequences": "0"}
    (tmp_path / "my.toml").write_text(to_toml(config(tmp_path, **options)))
    done = launch("cpu-2", "-m", "dlm.cli.train", "--config", str(tmp_path / "my.toml"))
    said = [line for line in done.stderr.splitlines() if line.startswith("dlm-train: step 2: the loss is ")]
    # The launcher stops the others as soon as one has ended: perhaps before they could say why.
    assert done.returncode != 0 and said and "Lower train.lr" in said[0]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_batch_must_divide_among_the_processes(tmp_path):
    run = config(tmp_path, train__batch_size="4", train__micro_batch_size="4")
    with pytest.raises(UserError, match="over 2 processes is 2 sequences each, not a multiple of .* = 4"):
        processes.micro_batch_size(run, type("Two", (), {"num_processes": 2})())


def test_deepspeed_says_what_it_cannot_do(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    refused("DeepSpeed needs GPUs", processes.start, config(tmp_path))
    refused("use configs/accelerate/fsdp2.yaml", processes._prepare_deepspeed, None, config(tmp_path), False)
