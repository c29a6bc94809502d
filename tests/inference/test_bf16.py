"""A bfloat16 model on a CPU takes the path in C: near to the truth, the same bits in any company, every way to multiply."""

import copy

import pytest
import torch

import dlm
from dlm.inference.compute import Compute
from dlm.inference.config import EngineConfig
from dlm.kernels.c import binding
from dlm.kernels.paths import PATHS, UNITS
from tests.refusals import refused

from .test_fused import NETWORKS, logits, stirred
from .tiny import tiny_lm

pytestmark = pytest.mark.skipif(binding.unavailable() is not None, reason=str(binding.unavailable()))


def halved(seed: int, name: str) -> tuple[dlm.LM, dlm.LM]:
    """A model of bfloat16 weights, and one that computes with the same numbers in float32."""
    lm = stirred(seed, name)
    lm.network.to(torch.bfloat16)
    exact = dlm.LM(copy.deepcopy(lm.network).float(), lm.tokenizer, "exact")
    return lm, exact


def path(unit: str) -> str:
    why = PATHS[f"c-{unit}"].missing(torch.device("cpu"), torch.bfloat16)
    return f"c-{unit}" if why is None else pytest.skip(why)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", NETWORKS)
def test_logits_are_nearer_to_the_truth_than_torch_s(name, unit, monkeypatch):
    kernels = path(unit)
    lm, exact = halved(3, name)
    found, theirs = (logits(lm, monkeypatch, range(4), kernels=each) for each in (kernels, "torch"))
    truth = logits(exact, monkeypatch, range(4), kernels="torch")
    ours, other = (
        torch.stack([(each[i][0].float() - truth[i][0]).abs().mean() for i in truth]).mean() for each in (found, theirs)
    )
    assert ours < other and ours < 0.02 * torch.stack([truth[i][0].abs().mean() for i in truth]).mean()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("cache", ["auto", "none", "dual"])
def test_no_bit_depends_on_the_company(unit, cache, monkeypatch):
    kernels = path(unit)
    lm, _ = halved(4, "norms of heads")
    together = logits(lm, monkeypatch, range(5), cache=cache, kernels=kernels)
    for number in range(5):
        alone = logits(lm, monkeypatch, range(number, number + 1), cache=cache, kernels=kernels)
        for name, steps in alone.items():
            assert len(steps) == len(together[name])
            assert all(torch.equal(a, b) for a, b in zip(steps, together[name], strict=True))


def test_weights_without_copies_give_the_same_bits(monkeypatch):
    lm, _ = halved(5, "biases")
    found = logits(lm, monkeypatch, range(2), kernels="c")
    monkeypatch.setattr("dlm.inference.fused.SHARE_OF_COPIES", 0)
    Compute(lm, EngineConfig(kernels="c")).reload()
    again = logits(lm, monkeypatch, range(2), kernels="c")
    assert all(torch.equal(a, b) for name in found for a, b in zip(found[name], again[name], strict=True))


def test_the_path_is_found_and_named():
    lm = tiny_lm(0)
    refused("it multiplies bfloat16, and the model is float32", dlm.Engine, lm, kernels="c-widened")
    lm.network.to(torch.bfloat16)
    compute = Compute(lm, EngineConfig())
    assert compute.path.name == "c" and compute.fused is not None
    lm.network.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert Compute(lm, EngineConfig()).path.name == "torch"  # C's single kernels are for floats
