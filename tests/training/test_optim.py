import math

import pytest
import torch

from dlm.errors import UserError
from dlm.models import ModelConfig, Transformer
from dlm.training.config import GroupConfig, OptimConfig, TrainSection
from dlm.training.language import matrices_of
from dlm.training.optim import Muon, build_optimizer, lr_factor, orthogonalise, parameter_groups
from dlm.training.run import Run
from tests.training.runs import config


@pytest.mark.parametrize("bf16", [False, True])
def test_muon_follows_torchs_own_up_to_bfloat16(bf16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 16), (16, 16), (24, 8), (8, 24)]
    ours = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    a = Muon(ours, bf16, **options)
    b = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0.02, atol=0.01)


def test_orthogonalised_matrices_have_singular_values_near_one():
    some = torch.randn(3, 32, 12, generator=torch.Generator().manual_seed(1))
    for bf16 in (False, True):
        found = orthogonalise(some, (3.4445, -4.7750, 2.0315), 8, bf16)
        values = torch.linalg.svdvals(found)
        assert found.dtype == torch.float32 and values.min() > 0.6 and values.max() < 1.3
        assert torch.equal(found, found.bfloat16().float()) == bf16  # which type it was computed in


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_muon_has_the_runs_precision(tmp_path, precision):
    run = Run(config(tmp_path, train__precision=precision))
    assert run.optimizer.parts["muon"].bf16 == (precision == "bf16")


def test_every_parameter_is_in_one_group():
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 4}
    network = Transformer(ModelConfig(**shape, position_embedding="learned"))
    groups = parameter_groups(network, matrices_of(network))
    together = [id(p) for group in groups.values() for p in group]
    assert sorted(together) == sorted(id(p) for p in network.parameters())
    assert [len(groups[name]) for name in ("embed", "head", "hidden", "scalar")] == [2, 1, 14, 5]


def test_groups_take_their_own_settings_and_zero_freezes():
    network = Transformer(ModelConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, head_dim=4))
    hidden = GroupConfig(algorithm="muon", lr_scale=2, weight_decay=0.3)
    config = OptimConfig(hidden=hidden, embed=GroupConfig(lr_scale=0), head=GroupConfig(lr_scale=0.5))
    optimizer = build_optimizer(network, matrices_of(network), config, lr=0.1)
    found = [(g["algorithm"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [("adamw", 0.05, 0.0), ("adamw", 0.1, 0.0), ("muon", 0.2, 0.3)]
    assert not network.embed.weight.requires_grad


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (("lm_head", "embed"), {"lm_head", "embed"}),
        (("mlp",), {f"layers.{i}.mlp.{part}_proj" for i in (0, 1) for part in ("gate", "up", "down")}),
        (("layers.1.attn",), {f"layers.1.attn.{part}_proj" for part in "qkvo"}),
        (("layers.*.mlp_norm", "norm"), {"layers.0.mlp_norm", "layers.1.mlp_norm", "norm"}),
        (("?_proj",), {f"layers.{i}.attn.{part}_proj" for i in (0, 1) for part in "qkvo"}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_freezing_goes_by_whole_parts_of_module_names(patterns, frozen):
    network = Transformer(ModelConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, head_dim=4))
    optimizer = build_optimizer(network, matrices_of(network), OptimConfig(freeze=patterns), lr=0.1)
    still = {name.rpartition(".")[0] for name, p in network.named_parameters() if not p.requires_grad}
    assert still == frozen
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in network.parameters() if p.requires_grad}


def test_what_cannot_be_frozen_is_named_with_what_can():
    network = Transformer(ModelConfig(vocab_size=50, num_hidden_layers=2, tie_word_embeddings=True))
    known = r"known: embed, layers\.\*\.attn_norm, .*, norm \(the output head is the embedding\)"
    with pytest.raises(UserError, match=f"optim.freeze = 'lm_head': no such module; {known}"):
        build_optimizer(network, matrices_of(network), OptimConfig(freeze=("lm_head",)), lr=0.1)
    with pytest.raises(UserError, match="leave nothing to train"):
        build_optimizer(network, matrices_of(network), OptimConfig(freeze=("*",)), lr=0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "cosine", "min_lr_ratio": 0.1}, {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 110: 0.1}),
        ({"schedule": "linear"}, {4: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
        ({"schedule": "constant"}, {10: 1.0, 109: 1.0}),
        ({"schedule": "wsd", "decay_steps": 20}, {10: 1.0, 90: 1.0, 100: 0.5, 110: 0.0}),
    ],
    ids=lambda value: value.get("schedule", ""),
)
def test_schedules(options, expected):
    section = TrainSection(steps=110, warmup_steps=10, **options)
    assert all(math.isclose(lr_factor(step, section), factor, abs_tol=1e-9) for step, factor in expected.items())


def test_averages_follow_their_formula_and_are_what_is_validated_and_saved(tmp_path):
    run, mean = Run(config(tmp_path, train__ema="0.75")), {}
    for _ in range(3):
        run.optimiser_step()
        now = {name: p.detach().clone() for name, p in run.network.named_parameters()}
        mean = {name: 0.75 * mean[name] + 0.25 * p for name, p in now.items()} if mean else now
    with run.averaged() as model:
        for name, p in model.network.named_parameters():
            torch.testing.assert_close(p, mean[name])
    assert all(torch.equal(p, now[name]) for name, p in run.network.named_parameters())
