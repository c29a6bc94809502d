"""A run whose numbers are no longer finite stops with an error, and neither a checkpoint nor a model holds them."""

import pytest
import torch
from safetensors.torch import load_file

from dlm.cli import train as command
from dlm.config import to_toml
from dlm.errors import UserError
from dlm.training import checkpoint
from dlm.training.loop import go, train
from dlm.training.run import Run
from tests.refusals import refused
from tests.training.runs import config, rows


def test_the_first_loss_that_is_not_finite_ends_the_run(tmp_path, capsys):
    cfg = config(tmp_path, train__lr="1e20", checkpoint__every="1", checkpoint__keep_last="9")
    (tmp_path / "my.toml").write_text(to_toml(cfg))
    assert command.main(["--config", str(tmp_path / "my.toml")]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dlm-train: ")]
    step = len(rows(tmp_path / "run")) + 1
    assert f"step {step}: the loss is nan and the gradient norm" in said and "at learning rate 1e+20" in said
    assert "Lower train.lr (now 1e+20)" in said and "train.warmup_steps (now 2)" in said and "another train.out" in said
    left = checkpoint.found(tmp_path / "run" / "checkpoints")
    assert checkpoint.step_of(left[0]) < step and str(left[0]) in said
    for file in left:
        assert all(values.isfinite().all() for values in load_file(file / "model.safetensors").values())
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path):
    run = Run(config(tmp_path))
    step = run.optimiser_step
    run.optimiser_step = lambda: (step()[0], float("inf") if run.step == 3 else 1.0)
    refused(r"step 3: the loss is [\d.]+ and the gradient norm inf.*no checkpoint was written", go, run)


@pytest.mark.parametrize("where", ["weight", "optimiser"])
def test_a_checkpoint_of_lost_weights_is_not_written(tmp_path, where):
    run = Run(config(tmp_path))
    run.optimiser_step()
    run.save_checkpoint()
    run.optimiser_step()
    parameter = run.network.embed.weight
    values = parameter if where == "weight" else run.optimizer.state[parameter]["exp_avg_sq"]
    with torch.no_grad():
        values[3, 2] = torch.inf
    refused(r"step 2: network.embed.weight.* is not finite.*step-00000001", run.save_checkpoint)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_last_step_that_ruins_the_weights_leaves_no_model(tmp_path):
    """The loss of the last step is from before it."""
    with pytest.raises(UserError, match="step 1: .* is not finite, at learning rate 1e\\+38"):
        train(config(tmp_path, train__lr="1e38", train__steps="1", train__warmup_steps="0", eval__sequences="0"))
    assert not (tmp_path / "run" / "model.safetensors").exists()
