"""The four stages through `dlm.train`: they learn, resume bitwise, do not depend on how a step is cut, and name mistakes."""

import json
import shutil
import signal

import pytest
import torch

import dlm
from dlm.latent.likelihood import bound
from dlm.latent.objective import LatentObjective
from dlm.latent.trainable import LatentModel
from dlm.training.loop import train
from dlm.training.run import Run
from tests.latent.tiny import ids, network
from tests.refusals import refused
from tests.training import killed
from tests.training.runs import config, rows

CODING = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
DENOISING = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


def toml(table: dict) -> str:
    """As the command line would spell it."""
    parts = (
        f'"{key}" = {toml(value) if isinstance(value, dict) else json.dumps(value)}' for key, value in table.items()
    )
    return "{" + ", ".join(parts) + "}"


def stage(folder, out, own, **more):
    options = {"trainable__kind": "latent", "train__ema": "0.5", "train__lr": "0.01", "train__steps": "40"}
    options |= {
        "optim__hidden__algorithm": "adamw",
        "train__batch_size": "8",
        "eval__draws": "2",
        "checkpoint__every": "1",
    }
    if "train__init_from" in more:
        options["train__tokenizer"] = "none"
    return config(folder, out, **(options | {"trainable__own": toml(own)} | more))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with an autoencoder, `ae`, and a flow over it, `flow`."""
    folder = tmp_path_factory.mktemp("latent")
    ae = train(stage(folder, "ae", {"stage": "autoencoder", "channels": 12, "autoencoder": CODING}))
    own = {"stage": "flow", "denoiser": DENOISING}
    flow = train(stage(folder, "flow", own, train__init_from=str(folder / "ae")))
    return folder, ae, flow


def test_an_autoencoder_and_a_flow_learn_are_saved_and_write(trained):
    folder, ae, flow = trained
    assert ae.losses[-1] < 0.4 * ae.losses[0] and ae.bound is None
    assert ae.figures["right/0"] > 0.5 and ae.figures["right/0"] >= ae.figures["right/1"]
    assert sum(flow.losses[-8:]) < 0.9 * sum(flow.losses[:8]) and flow.bound is not None
    lm = dlm.load(folder / "flow")
    assert lm.network.shape.stage == "flow" and lm.network.std.ne(1).all()
    again = Run(stage(folder, "again", {"stage": "flow"}, train__init_from=str(folder / "flow")))
    texts = again._batch().input_ids
    z = lm.network.encode(texts)
    levels = {level: bound(lm.network, texts.repeat(8, 1), draws=8, t_min=level).mean() for level in (0.02, 0.4)}
    assert bound(lm.network, texts.repeat(8, 1), draws=8).mean() <= 1.02 * min(levels.values())
    assert max(levels.values()) > 1.1 * min(levels.values())  # so that it matters
    assert z.mean().abs() < 0.3 and 0.6 < z.std() < 1.5
    assert dlm.generate(lm, ["def f"], gen_length=8)[0].text
    old, new = (dlm.load(folder / name).network.state_dict() for name in ("ae", "flow"))
    assert all(torch.equal(new[name], old[name]) for name in old if name not in ("mean", "std"))


FURTHER = [
    ("flow", "ae", {"stage": "flow", "denoiser": DENOISING, "times": "adaptive", "block_length": 2}),
    ("joint", "flow", {"stage": "joint", "encoder_gradient": 0.1, "anchor_weight": 0.1}),
    ("adapter", "flow", {"stage": "adapter", "prompt_probability": 1.0}),
]


@pytest.mark.parametrize(("name", "begins", "own"), FURTHER)
def test_a_killed_run_goes_on_bitwise(trained, tmp_path, name, begins, own):
    folder, *_ = trained
    shutil.copy(folder / "corpus.jsonl", tmp_path)
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    options = {"train__init_from": str(folder / begins), "train__steps": "12"}
    straight = train(stage(tmp_path, "straight", own, **options))
    cfg = stage(tmp_path, "killed", own, **options)
    assert killed.run(cfg, 6 * 7 + 4, "tests.latent.test_training") == -signal.SIGKILL
    resumed = train(cfg)
    assert 0 < len(resumed.losses) < 12 and resumed.losses == straight.losses[-len(resumed.losses) :]
    assert resumed.bound == straight.bound
    one, two = (dlm.load(r.folder).network.state_dict() for r in (straight, resumed))
    assert all(torch.equal(one[name], two[name]) for name in one)
    lm = dlm.load(straight.folder)
    assert lm.network.shape.stage == name
    if name == "adapter":
        assert dlm.generate(lm, ["def f"], gen_length=8, solver="adapter")[0].nfe == 1
    assert {"joint": {"loss/text", "loss/flow", "loss/anchor"}, "adapter": {"loss/answer", "loss/kl"}}.get(
        name, set()
    ) <= rows(straight.folder)[0].keys() | rows(straight.folder)[1].keys()


def test_a_step_does_not_depend_on_how_it_is_cut(trained):
    folder, *_ = trained
    for own in (
        {"stage": "flow", "times": "adaptive", "denoiser": DENOISING},
        {"stage": "joint", "encoder_gradient": 0.5},
    ):
        losses = []
        for micro in ("none", "2"):
            begins = "ae" if own["stage"] == "flow" else "flow"
            options = {
                "train__init_from": str(folder / begins),
                "train__micro_batch_size": micro,
                "train__resume": "false",
            }
            run = Run(stage(folder, "cut", own, **options))
            losses.append([sum(run.optimiser_step()[0].values()) for _ in range(3)])
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_alignment_draws_the_decoders_states_to_a_frozen_model(trained):
    folder, *_ = trained
    causal = train(config(folder, "causal", objective__masking="causal"))
    own = {"stage": "autoencoder", "channels": 12, "autoencoder": CODING, "align": str(causal.folder)}
    result = train(stage(folder, "aligned", own))
    parts = [line for line in rows(result.folder) if "loss/align" in line]
    assert parts[-1]["loss/align"] < 0.8 * parts[0]["loss/align"]
    assert "to_teacher.weight" not in dlm.load(result.folder).network.state_dict()


class FakeBatch:
    """As much of a batch as an objective reads."""

    def __init__(self, tokens, answer=None):
        self.input_ids, self.index, self.step = tokens, torch.arange(len(tokens)), 0
        self.answer = torch.ones_like(tokens, dtype=torch.bool) if answer is None else answer
        self.samples = len(tokens)


def settings(**own):
    from dlm.latent.config import LatentConfig

    return LatentConfig(**{"stage": "flow", **own})


def test_the_flows_loss_is_the_mean_squared_error_of_what_is_not_given(monkeypatch):
    found, tokens = network(self_conditioning=False), ids()
    zero = torch.zeros(3, 7, 6)
    monkeypatch.setattr(found, "velocity", lambda *a, **k: zero)
    objective = LatentObjective(found, settings(prompt_probability=0.0), seed=4)
    (loss,) = objective(FakeBatch(tokens)).values()
    from dlm.diffusion.rng import Purpose, normal

    noise = normal(Purpose.NOISE, seed=4, sample=torch.arange(3)[:, None], step=0, position=torch.arange(7), size=6)
    target = noise - found.encode(tokens)
    assert loss.item() == pytest.approx(target.square().mean().item(), rel=1e-5)
    answer = torch.zeros_like(tokens, dtype=torch.bool)
    answer[:, 9:] = True
    (part,) = objective(FakeBatch(tokens, answer)).values()
    assert part.item() == pytest.approx(target[:, 3:].square().mean().item() * 4 / 7, rel=1e-5)


def test_the_flow_does_not_reach_the_encoder_unless_it_is_asked_to():
    tokens = ids()
    for counts, reached in ((0.0, False), (0.5, True)):
        found = network(stage="joint")
        objective = LatentObjective(found, settings(stage="joint", encoder_gradient=counts), seed=0)
        objective(FakeBatch(tokens))["flow"].backward()
        touched = any(p.grad is not None and p.grad.any() for p in found.encoder.parameters())
        assert touched == reached


OTHER = {"stage": "flow", "denoiser": DENOISING}


@pytest.mark.parametrize(
    ("own", "begins", "message"),
    [
        ({"stage": "flow"}, None, r'\[trainable.own\] stage = "flow" goes on from an autoencoder: set train.init_from'),
        ({"stge": "flow"}, None, 'unknown key "stge"; did you mean "stage"'),
        ({"latents": 4}, None, 'latents = 4 is only read with kind = "perceiver"'),
        ({"kl_weight": 0.1}, None, "kl_weight = 0.1 needs variational = true"),
        ({"times_std": 2.0, **OTHER}, "ae", 'times_std = 2 is only read with times = "logit_normal"'),
        ({"noise": 1.0, **OTHER}, "ae", 'noise = 1 is only read with stage = "autoencoder" or "joint"'),
        ({"channels": 5, **OTHER}, "ae", "channels = 5, but train.init_from = .* has 12: leave channels out"),
        ({"stage": "autoencoder"}, "flow", 'stage = "autoencoder", but .* has a flow, which would be lost'),
        ({"align": "pico", "autoencoder": CODING}, None, 'align = "pico" has another tokenizer'),
        ({"kind": "perceiver", "block_length": 2}, None, 'block_length = 2 is only read with kind = "chunk"'),
        ({"denoiser": {"hidden_size": 30}, "stage": "flow"}, "ae", "hidden_size = 30 must be an even multiple"),
        ({"path": "vp", "stage": "adapter"}, "flow", "path = vp, but train.init_from = .* has linear"),
    ],
)
def test_mistakes_are_named(trained, own, begins, message):
    folder, *_ = trained
    more = {} if begins is None else {"train__init_from": str(folder / begins)}
    refused(message, lambda: Run(stage(folder, "no", own, **more)))


def test_other_sections_and_models_are_refused(trained, tmp_path):
    folder, *_ = trained
    refused(
        r"\[objective\] is not read with trainable.kind = 'latent'",
        lambda: Run(stage(folder, "no", {"stage": "autoencoder"}, objective__masking="causal")),
    )
    refused(
        "train.init_from = 'sudoku' is a dlm network, which predicts tokens",
        lambda: Run(stage(folder, "no", {"stage": "flow"}, train__init_from="sudoku")),
    )
    refused(
        "train.length = 32 exceeds the 16 tokens",
        lambda: Run(stage(folder, "no", OTHER, train__init_from=str(folder / "ae"), train__length="32")),
    )
    assert LatentModel.sections == ()


@pytest.mark.parametrize("name", ["autoencoder", "flow", "joint", "adapter"])
def test_the_shipped_stages_are_valid_and_follow_one_another(name):
    from dlm import config as files
    from dlm.latent.config import STAGES, LatentConfig
    from dlm.training.config import TrainConfig

    found = files.load(TrainConfig, [f"latent/{name}"])
    own = files.check(LatentConfig, found.trainable.own, name)
    assert own.stage == name and name in STAGES
    assert found.train.init_from in (None, "runs/latent/autoencoder", "runs/latent/flow")


def test_flops_count_each_weight_by_the_rows_that_meet_it():
    from torch.utils.flop_counter import FlopCounterMode

    for fields in ({}, {"block_length": 2}, {"self_conditioning": False}):
        found = network(**fields)
        own = settings(stage="flow", **fields)
        model = LatentModel.__new__(LatentModel)
        model.network, model.own = found, own
        model.config = type("Config", (), {"train": type("Train", (), {"length": 36})})
        tokens = ids(4, 36)
        z, t = found.encode(tokens), torch.rand(4, 1 if not found.shape.block_length else 6)
        with FlopCounterMode(display=False) as counter:
            found.velocity(z, t, torch.zeros(4, 12, dtype=torch.bool), before=z if fields.get("block_length") else None)
            rows = 24 if fields.get("block_length") else 12
            attention = 4 * rows * rows * 16 * 2  # of a text in two layers: torch counts no fused one on a CPU
            forward = counter.get_total_flops() / tokens.numel() + attention / 36
        with FlopCounterMode(display=False) as counter:
            found.encode(tokens)
        times = 3.5 if found.shape.self_conditioning else 3.0
        expected = times * forward + counter.get_total_flops() / tokens.numel()
        assert model.flops_a_token() == pytest.approx(expected, rel=0.07), fields
