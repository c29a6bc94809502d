import pytest
import torch

import dlm
from dlm.errors import UserError
from dlm.models.adapters import is_adapted
from dlm.training import language
from dlm.training.loop import train
from dlm.training.run import Run
from tests.models.test_adapters import needs_bitsandbytes
from tests.training.runs import config, rows

pytest.importorskip("peft", reason="needs the extra `qlora`: peft")

OPTIONS = {"train__steps": "20", "train__lr": "0.02", "train__ema": "0.5", "train__gradient_checkpointing": "true"}
OPTIONS |= {"adapter__r": "4", "adapter__dropout": "0.1", "adapter__merge": "true"}
IDS = torch.arange(12)[None]
KINDS = ["lora", pytest.param("qlora", marks=needs_bitsandbytes)]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A causal model to start from."""
    folder = tmp_path_factory.mktemp("base")
    # 4-bit kernels of some CPUs take rows in multiples of 32 only, and blocks of 64 weights
    wide = {"model__hidden_size": "64", "model__head_dim": "32", "model__intermediate_size": "64"}
    return str(train(config(folder, train__steps="2", objective__masking="causal", eval__sequences="0", **wide)).folder)


@torch.no_grad()
def logits(folder, **options) -> torch.Tensor:
    return dlm.load(folder, device="cpu", **options).network(IDS)


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_save_the_adapter_alone_and_merge_to_the_same_logits(tmp_path, base, kind):
    run = config(tmp_path, train__init_from=base, adapter__kind=kind, **OPTIONS)
    result = train(run)
    losses = [row["loss"] for row in rows(result.folder) if "loss" in row]
    assert len(losses) == 20 and sum(losses[-5:]) < sum(losses[:5])
    assert not list(result.folder.glob("model*.safetensors"))
    apart = dlm.load(result.folder, device="cpu", merge=False, quantize="nf4" if kind == "qlora" else None)
    assert is_adapted(apart.network) and apart.config.attention == "bidirectional"  # converted as the run's was
    with torch.no_grad():
        unmerged = apart.network(IDS)
    torch.testing.assert_close(unmerged, logits(result.folder / "merged"), rtol=1e-5, atol=1e-5)
    assert (unmerged - logits(base)).abs().max() > 0.01
    assert dlm.generate(apart, ["def f"], gen_length=4)[0].nfe >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_exactly_and_its_checkpoint_holds_the_adapter_alone(tmp_path, base, kind):
    options = {**OPTIONS, "train__init_from": base, "adapter__kind": kind, "train__steps": "6", "eval__sequences": "0"}
    straight = train(config(tmp_path, "straight", **options))
    first = Run(config(tmp_path, "stopped", **options))
    losses = [sum(first.optimiser_step()[0].values()) for _ in range(3)]
    first.save_checkpoint()
    assert losses + train(config(tmp_path, "stopped", **options)).losses == straight.losses
    torch.testing.assert_close(logits(tmp_path / "stopped"), logits(tmp_path / "straight"), rtol=1e-5, atol=1e-5)
    (saved,) = (tmp_path / "stopped" / "checkpoints").glob("*/model.safetensors")
    assert saved.stat().st_size < 4 * sum(p.numel() for p in first.network.parameters() if p.requires_grad) + 5000


def test_only_the_adapter_trains_and_muon_leaves_it_alone(tmp_path, base):
    run = Run(config(tmp_path, train__init_from=base, adapter__kind="lora", optim__hidden__algorithm="muon"))
    before = {name: p.clone() for name, p in run.network.named_parameters()}
    for _ in range(2):
        run.optimiser_step()
    moved = {name for name, p in run.network.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert {group["algorithm"] for group in run.optimizer.param_groups} == {"adamw"}


def test_frozen_weights_of_a_bf16_run_are_kept_in_bf16(tmp_path, base):
    run = Run(config(tmp_path, train__init_from=base, adapter__kind="lora", train__precision="bf16"))
    kinds = {p.requires_grad: p.dtype for p in run.network.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert all(part == part for part in run.optimiser_step()[0].values())


def test_impossible_adapters_say_so_before_work(tmp_path, base):
    with pytest.raises(UserError, match=r"adapter\.kind = 'lora' needs the model it adapts: set train\.init_from"):
        config(tmp_path, adapter__kind="lora")
    with pytest.raises(UserError, match=r"is the model that is adapted, train\.init_from: choose another folder"):
        Run(config(tmp_path, train__out=base, train__init_from=base, adapter__kind="lora"))


@needs_bitsandbytes
def test_shapes_that_cannot_be_quantised_are_named_before_anything_is_loaded(tmp_path, monkeypatch):
    import bitsandbytes

    def fail(self, x):
        assert self.out_features % 32 == 0, "rows must be divisible by 32"
        return x

    narrow = train(config(tmp_path, "narrow", train__steps="2", eval__sequences="0")).folder  # 16 and 24 rows
    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "forward", fail)
    monkeypatch.setattr(language, "starting_point", None)
    with pytest.raises(
        UserError, match=r"cannot do nf4 on cpu for a matrix of 16 rows and 16 columns, which this model"
    ):
        Run(config(tmp_path, train__init_from=str(narrow), adapter__kind="qlora"))
