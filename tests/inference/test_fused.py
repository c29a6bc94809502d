"""The layers in one call of C: what the modules give, for every plain network; and weights that change."""

import pytest
import torch
from torch import nn

import dlm
from dlm.inference.compute import Compute
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.decoding import continuations
from dlm.inference.fused import FusedLayers
from dlm.inference.layout import Layout
from dlm.kernels.c import binding, products
from dlm.models.fingerprint import weights_digest
from dlm.trace.reader import TraceReader
from tests.refusals import refused

from . import requests
from .requests import FAMILIES, RULE, drive, prompts, tokens
from .tiny import tiny_lm

pytestmark = pytest.mark.skipif(binding.unavailable() is not None, reason=str(binding.unavailable()))

NETWORKS: dict[str, dict] = {
    **FAMILIES,
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "norms of heads": {"qk_norm": True},
    "part of a head turned": {"rotary_dim": 4},
    "places learned": {"position_embedding": "learned"},
    "tied": {"tie_word_embeddings": True},
    "as many key heads": {"num_key_value_heads": 4},
    "one layer": {"num_hidden_layers": 1},
}
UNEVEN = {"hidden_size": 40, "intermediate_size": 70, "vocab_size": 67}
NETWORKS["one key head, uneven widths"] = {"num_key_value_heads": 1, **UNEVEN}


def stirred(seed: int, name: str) -> dlm.LM:
    """Norms that are not all 1, biases that are not all 0: each in its own way."""
    lm, draw = tiny_lm(seed, **NETWORKS[name]), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.network.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.3)
    return lm


def logits(lm: dlm.LM, monkeypatch: pytest.MonkeyPatch, names: range, **engine) -> dict[str, list[torch.Tensor]]:
    settings = SamplerConfig(gen_length=16, block_length=4, steps=8)
    work = [continuations(lm, prompts(9)[i : i + 1], settings, where="", request_ids=[str(i)])[0] for i in names]
    return requests.logits(monkeypatch, lm, work, **engine)


@pytest.mark.parametrize("cache", ["auto", "none", "dual"])
@pytest.mark.parametrize("name", NETWORKS)
def test_c_gives_what_the_modules_give(name, cache, monkeypatch):
    lm = stirred(3, name)
    if cache == "dual" and lm.config.attention != "bidirectional":
        pytest.skip("no such cache")
    calls = []
    original = FusedLayers.__call__
    monkeypatch.setattr(FusedLayers, "__call__", lambda self, *a: calls.append(1) or original(self, *a))
    found = logits(lm, monkeypatch, range(5), cache=cache, kernels="c")
    assert calls
    calls.clear()
    expected = logits(lm, monkeypatch, range(5), cache=cache, kernels="torch")
    assert not calls
    for name, steps in expected.items():
        for ours, theirs in zip(found[name], steps, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_bit_depends_on_the_company(name, monkeypatch):
    lm = stirred(4, name)
    together = logits(lm, monkeypatch, range(9))
    for i in (0, 4, 8):
        alone = logits(lm, monkeypatch, range(i, i + 1))
        assert all(torch.equal(a, b) for a, b in zip(alone[str(i)], together[str(i)], strict=True))


SETTINGS = {"gen_length": 16, "block_length": 8, "steps": 16}
ASKED = {"prompts": [[5, 6, 7]], **SETTINGS}


def written(lm: dlm.LM, kernels: str = "c") -> list[int]:
    return dlm.generate(lm, [[5, 6, 7]], cache="dual", kernels=kernels, **SETTINGS)[0].tokens


def trained(network: nn.Module, how: str) -> None:
    """One step of an optimiser, or another way in which weights become others."""
    down, new = network.layers[0].mlp.down_proj, torch.Generator().manual_seed(5)
    values = torch.randn(down.weight.shape, generator=new)
    if how in ("fused", "foreach"):
        network.requires_grad_(True).train()
        network(torch.arange(12)[None]).logsumexp(-1).sum().backward()
        torch.optim.SGD(network.parameters(), lr=0.05, **{how: True}).step()
        network.eval()
    elif how == "in place":
        with torch.no_grad():
            down.weight.copy_(values)
    elif how == "loaded":
        network.load_state_dict({**network.state_dict(), "layers.0.mlp.down_proj.weight": values})
    elif how == "through data":
        down.weight.data.copy_(values)
    elif how == "another place":
        down.weight.data = values
    elif how == "there and back":  # rounded on the way, perhaps to where it was
        network.to(torch.bfloat16).to(torch.float32)
        trained(network, "in place")
    elif how == "another parameter":
        down.weight = nn.Parameter(values)
    elif how == "another module":
        network.layers[0].mlp.down_proj = nn.Sequential(down, nn.SiLU())
    else:
        down.register_forward_hook(lambda module, args, out: out * 3)


SEEN = ["fused", "foreach", "in place", "loaded", "through data", "another place", "there and back"]
SEEN += ["another parameter"]
WAYS = [*SEEN, "another module", "a hook"]


@pytest.mark.parametrize("how", WAYS)
def test_each_call_of_generate_sees_the_weights_of_now(how):
    lm, twin = tiny_lm(1), tiny_lm(1)
    before = written(lm)
    for changed in (lm, twin):
        trained(changed.network, how)
    expected = written(twin, "torch")
    assert expected != before
    assert written(lm, "auto") == expected


@pytest.mark.parametrize(("dtype", "kernels"), [("bfloat16", "auto"), ("float32", "torch"), ("float32", "c")])
def test_training_goes_on_as_if_nothing_had_been_decoded(dtype, kernels):
    """Decoding moves weights; torch's fused optimisers overwrite the neighbours of those that are not contiguous."""
    weights = []
    for decodes in (False, True):
        network = (lm := tiny_lm(1).to(dtype)).network.requires_grad_(True)
        optimiser = torch.optim.AdamW(network.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            optimiser.zero_grad()
            network(torch.arange(12)[None]).float().logsumexp(-1).sum().backward()
            optimiser.step()
            if decodes:
                written(lm, kernels)
        weights.append(network.state_dict())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("kernels", ["c", "torch"])
@pytest.mark.parametrize("how", SEEN)
def test_an_idle_engine_refuses_changed_weights_until_it_is_reloaded(how, kernels):
    lm, twin = tiny_lm(1), tiny_lm(1)
    engine = dlm.Engine(lm, cache="dual", kernels=kernels)
    before = engine.generate(**ASKED)[0].tokens
    assert engine.generate(**ASKED)[0].tokens == before
    for changed in (lm, twin):
        trained(changed.network, how)
    refused(r"weights changed .* call engine.reload\(\)", engine.generate, **ASKED)
    assert not engine.has_work
    engine.reload()
    assert engine.generate(**ASKED)[0].tokens == written(twin, "torch") != before


@pytest.mark.parametrize("how", ["a hook", "unseen"])
def test_reload_sees_what_nothing_shows(how):
    lm, twin = tiny_lm(1), tiny_lm(1)
    engine = dlm.Engine(lm, cache="dual", kernels="auto")
    before = engine.generate(**ASKED)[0].tokens
    for changed in (lm, twin):
        if how == "a hook":
            trained(changed.network, how)
        else:  # all but the first values of a weight, through .data
            changed.network.layers[0].mlp.down_proj.weight.data[1:].mul_(-3)
    engine.reload()
    assert engine.generate(**ASKED)[0].tokens == written(twin, "torch") != before


def test_frozen_layers_outlive_what_they_were_made_of():
    """A request under way ends with the weights it began with, though they were freed."""
    lm, twin = tiny_lm(1), tiny_lm(1)
    expected = written(twin)
    engine = dlm.Engine(lm, cache="dual", kernels="c")
    engine.add_request(ASKED["prompts"][0], **SETTINGS)
    for parameter in lm.network.parameters():
        parameter.data = torch.full_like(parameter, torch.nan)
    assert [event.result.tokens for event in engine.stream() if event.result] == [expected]


def test_reload_forgets_kept_keys_and_says_the_new_digest(tmp_path):
    lm, twin = (tiny_lm(1, **FAMILIES["sdar"]) for _ in range(2))
    prompt = list(range(40))
    with dlm.TraceStore(tmp_path / "traces.db") as store:
        engine = dlm.Engine(lm, page_size=4, trace=store)
        engine.generate([prompt], gen_length=8, request_ids=["before"])
        assert engine.stats().pages_cached
        for changed in (lm, twin):
            changed.network.layers[0].mlp.down_proj.weight.data[1:].mul_(-3)  # which nothing shows
        engine.reload()
        assert not engine.stats().pages_cached
        found = engine.generate([prompt], gen_length=8, request_ids=["after"])[0].tokens
    with TraceReader(tmp_path / "traces.db") as reader:
        digests = [reader[name].context["weights"] for name in ("before", "after")]
    assert found == dlm.generate(twin, [prompt], gen_length=8, kernels="torch")[0].tokens
    assert digests[0] != digests[1] == weights_digest(twin.network)


def test_reload_is_refused_while_a_request_is_under_way():
    engine = dlm.Engine(tiny_lm())
    engine.add_request([5, 6], **SETTINGS)
    engine.step()
    refused(r"reload\(\): 1 requests have begun", engine.reload)


def test_copies_are_made_once_for_the_same_weights(monkeypatch):
    lm, made = tiny_lm(1), []
    original = products.panels
    monkeypatch.setattr(products, "panels", lambda w: made.append(w.shape) or original(w))
    written(lm)
    first = len(made)
    assert first > 0
    written(lm)
    assert len(made) == first
    trained(lm.network, "in place")
    written(lm)
    assert len(made) == 2 * first


def test_where_memory_is_short_nothing_is_copied_and_nothing_changes(monkeypatch):
    lm = tiny_lm(1)
    expected = written(lm)
    other = tiny_lm(1)
    monkeypatch.setattr("dlm.inference.fused.SHARE_OF_COPIES", 0.0)
    monkeypatch.setattr(products, "panels", lambda w: pytest.fail("a copy"))
    assert written(other) == expected


def test_a_network_of_another_kind_is_left_to_its_modules():
    experts = tiny_lm(moe={"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16})
    assert Compute(tiny_lm(), EngineConfig(kernels="c")).fused is not None
    assert Compute(experts, EngineConfig(kernels="c")).fused is None
    assert Compute(tiny_lm(), EngineConfig(kernels="torch")).fused is None


def test_a_token_that_is_not_in_the_vocabulary_is_told():
    lm = tiny_lm()
    engine = dlm.Engine(lm, cache="dual")
    engine.add_request([1, 2, 3], gen_length=8, block_length=8, steps=8)
    with torch.inference_mode():
        items = engine.batch.scheduler.schedule()
        layout, fused = Layout(items, engine.batch.pool, lm.network), engine.batch.stepper.compute.fused
        assert fused is not None
        with pytest.raises(IndexError, match="token 64 is not in a vocabulary of 64"):
            fused(layout, torch.tensor([1, 2, 64, *[0] * 8]), torch.tensor([3]))


def test_decoding_is_the_same_on_any_number_of_threads():
    lm = tiny_lm(7, hidden_size=64, intermediate_size=200)
    before = torch.get_num_threads()
    found, work = [], continuations(lm, prompts(6), SamplerConfig(gen_length=16, **RULE), where="")
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(tokens(drive(lm, work)))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
