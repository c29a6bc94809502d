"""The seams: a model that is no `Transformer`, and a masking, each trained from one file and one line outside the package."""

import signal

import pytest
import torch

from dlm.cli import train as command
from dlm.config import to_toml
from dlm.errors import UserError
from dlm.training import checkpoint
from dlm.training.loop import train
from dlm.training.masking import MASKINGS, Entry
from dlm.training.masking.random import RandomMasking
from dlm.training.run import Run
from tests.refusals import refused
from tests.training import autoencoder, killed
from tests.training.runs import config, rows

OWN = {"trainable__kind": "autoencoder", "train__ema": "0.5", "watch__every": "2", "data__source": "jsonl"}


def test_a_model_that_is_no_transformer_trains_validates_is_killed_resumed_and_loaded(tmp_path):
    options = {**OWN, "train__steps": "40", "train__lr": "0.02", "eval__every": "20"}
    straight = train(config(tmp_path, "straight", **options))
    lines = rows(straight.folder)
    losses = [line for line in lines if "loss" in line]
    assert sum(straight.losses[-5:]) < 0.8 * sum(straight.losses[:5])
    assert losses[0]["loss"] == pytest.approx(losses[0]["loss/text"] + losses[0]["loss/latent"])
    bounds = [line["bound"] for line in lines if "bound" in line]
    assert len(bounds) == 2 and bounds[1] < bounds[0] and straight.bound == (bounds[1], 0.0)
    looks = [line for line in lines if "batches" in line]
    assert [line["batches"] for line in looks] == list(range(1, 21))
    assert {"grad_norm/hidden", "grad_norm/embed", "grad_norm/head", "grad_norm/scalar"} <= looks[0].keys()

    cfg = config(tmp_path, "killed", **options, checkpoint__every="1")
    assert killed.run(cfg, 20 * 7 + 4, "tests.training.autoencoder") == -signal.SIGKILL
    assert [p.name for p in checkpoint.found(tmp_path / "killed" / "checkpoints")] == ["step-00000020", "step-00000019"]
    resumed = train(cfg)
    assert resumed.losses == straight.losses[20:] and resumed.bound == straight.bound
    assert [line["batches"] for line in rows(resumed.folder) if "batches" in line] == list(range(1, 21))
    one, two = (autoencoder.load(result.folder).state_dict() for result in (straight, resumed))
    assert all(torch.equal(one[name], two[name]) for name in one)

    net = autoencoder.load(straight.folder)  # and it says what the last validation said
    run = Run(config(tmp_path, "again", **options))
    run.model.network = net
    assert run.held_out.bound(run.model, 1).per_token == straight.bound


def test_the_command_trains_it_and_optimiser_groups_are_the_models(tmp_path, capsys):
    cfg = config(tmp_path, **OWN, optim__embed__lr_scale="0", train__micro_batch_size="1", eval__sequences="0")
    (tmp_path / "my.toml").write_text(to_toml(cfg))
    assert command.main(["--config", str(tmp_path / "my.toml")]) == 0
    whole = train(config(tmp_path, "whole", **OWN, optim__embed__lr_scale="0", eval__sequences="0"))
    assert [r["loss"] for r in rows(tmp_path / "run") if "loss" in r] == pytest.approx(whole.losses, rel=1e-5)
    run = Run(config(tmp_path, "groups", **OWN, optim__embed__lr_scale="0"))
    found = {group["algorithm"]: [p.shape for p in group["params"]] for group in run.optimizer.param_groups}
    assert found["muon"] == [run.network.encode.weight.shape] and not run.network.embed.weight.requires_grad


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainable__kind": "autoencode"}, 'no such kind; did you mean "autoencoder"'),
        ({"trainable__own": '{"laten" = 3}'}, 'unknown key "laten"; did you mean "latent"'),
        ({"objective__masking": "causal"}, r"\[objective\] is not read with trainable.kind = 'autoencoder'"),
    ],
)
def test_settings_it_does_not_have_are_refused(tmp_path, overrides, message):
    refused(message, lambda: Run(config(tmp_path, **{**OWN, **overrides})))


class SpanMasking(RandomMasking):
    """One run of [objective.own] span tokens a row, drawn by its sample's number."""

    def views(self, batch):
        (view,) = super().views(batch)
        start = (batch.index * 7 + batch.step) % (batch.input_ids.shape[1] - self.config.own["span"])
        place = torch.arange(batch.input_ids.shape[1]) - start[:, None]
        masked = (place >= 0) & (place < self.config.own["span"])
        canvas = torch.where(masked, self.mask_id, batch.input_ids)
        weight = torch.full_like(view.weight, 1 / self.config.own["span"] / batch.samples)
        return [type(view)(canvas, batch.input_ids, masked, weight)]


def test_a_masking_from_outside_trains_by_its_own_settings_and_is_refused_those_it_does_not_read(tmp_path, monkeypatch):
    refused("must be one of random, .*trajectory", config, tmp_path, objective__masking="span")
    monkeypatch.setitem(MASKINGS, "span", Entry("tests.training.test_trainable:SpanMasking", ("own",), "block_causal"))
    options = {"objective__masking": "span", "objective__own__span": "3", "objective__truncate_probability": "0", "objective__block_length": "4"}  # fmt: skip
    refused("block_length = 4 is only read with masking = block or trajectory, not span", config, tmp_path, **options)
    MASKINGS["span"] = Entry("tests.training.test_trainable:SpanMasking", ("own", "block_length"), "block_causal")
    cfg = config(tmp_path, **options, train__steps="30", train__lr="0.02")
    result = train(cfg)
    assert sum(result.losses[-5:]) < 0.9 * sum(result.losses[:5])
    run = Run(config(tmp_path, "again", **options))
    view = run.objective.masking.views(run._batch())[0]
    assert (view.predicted.sum(-1) == 3).all() and run.network.attention.kind == "block_causal"
    with pytest.raises(UserError, match=r"own = \{'span': 3\} is only read with masking = span, not random"):
        config(tmp_path, **{**options, "objective__masking": "random", "objective__block_length": "none"})
