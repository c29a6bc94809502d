"""The layers in one call of C: what the modules give, for every plain network, and never what they gave before."""

import pytest
import torch
from torch import nn

import dlm
from dlm.inference import decide
from dlm.inference.config import SamplerConfig
from dlm.inference.decoding import continuations
from dlm.inference.fused import Fused
from dlm.inference.layout import Layout
from dlm.kernels import native

from .requests import FAMILIES, RULE, drive, prompts, tokens
from .tiny import tiny_lm

pytestmark = pytest.mark.skipif(not native.available(), reason=native.library()[1])

NETWORKS: dict[str, dict] = {
    **FAMILIES,
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "norms of heads": {"qk_norm": True},
    "part of a head turned": {"rotary_dim": 4},
    "places learned": {"position_embedding": "learned"},
    "tied": {"tie_word_embeddings": True},
    "as many key heads": {"num_key_value_heads": 4},
    "one key head, uneven widths": {
        "num_key_value_heads": 1,
        "hidden_size": 40,
        "intermediate_size": 70,
        "vocab_size": 67,
    },
    "one layer": {"num_hidden_layers": 1},
}


def logits(lm: dlm.LM, monkeypatch: pytest.MonkeyPatch, names: range, **engine) -> dict[str, list[torch.Tensor]]:
    """Of every request those of each step, decoded together."""
    seen: dict[str, list[torch.Tensor]] = {}
    original = decide._logits

    def listening(network, head, hidden, wanted, group):
        found = original(network, head, hidden, wanted, group)
        for question, part in zip(group, found.split([int(q.asked.sum()) for q in group]), strict=True):
            seen.setdefault(question.sequence.request.request_id, []).append(part.clone())
        return found

    settings = SamplerConfig(gen_length=16, block_length=4, steps=8)
    work = [continuations(lm, prompts(9)[i : i + 1], settings, where="", request_ids=[str(i)])[0] for i in names]
    with monkeypatch.context() as patch:
        patch.setattr(decide, "_logits", listening)
        drive(lm, work, **engine)
    return seen


@pytest.mark.parametrize("cache", ["auto", "none", "dual"])
@pytest.mark.parametrize("name", NETWORKS)
def test_c_gives_what_the_modules_give(name, cache, monkeypatch):
    lm = tiny_lm(3, **NETWORKS[name])
    if cache == "dual" and lm.config.attention != "bidirectional":
        pytest.skip("no such cache")
    calls = []
    monkeypatch.setattr(
        Fused, "__call__", lambda self, *a, original=Fused.__call__: calls.append(1) or original(self, *a)
    )
    found = logits(lm, monkeypatch, range(5), cache=cache)
    assert calls
    calls.clear()
    with native.twins_only():
        expected = logits(lm, monkeypatch, range(5), cache=cache)
    assert not calls
    for name, steps in expected.items():
        for ours, theirs in zip(found[name], steps, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_bit_depends_on_the_company(name, monkeypatch):
    lm = tiny_lm(4, **NETWORKS[name])
    together = logits(lm, monkeypatch, range(9))
    for i in (0, 4, 8):
        alone = logits(lm, monkeypatch, range(i, i + 1))
        assert all(torch.equal(a, b) for a, b in zip(alone[str(i)], together[str(i)], strict=True))


def written(lm: dlm.LM) -> list[int]:
    return dlm.generate(lm, [[5, 6, 7]], gen_length=16, block_length=8, steps=16, cache="dual")[0].tokens


def change(mlp: nn.Module, how: str) -> None:
    new = torch.randn(mlp.down_proj.weight.shape, generator=torch.Generator().manual_seed(5))
    if how == "in place":
        with torch.no_grad():
            mlp.down_proj.weight.copy_(new)
    elif how == "through data":
        mlp.down_proj.weight.data.copy_(new)
    elif how == "another place":
        mlp.down_proj.weight.data = new
    elif how == "another parameter":
        mlp.down_proj.weight = nn.Parameter(new)
    elif how == "another module":
        mlp.down_proj = nn.Sequential(mlp.down_proj, nn.SiLU())
    else:
        mlp.down_proj.register_forward_hook(lambda module, args, out: out * 3)


WAYS = ["in place", "another place", "another parameter", "another module", "a hook"]


@pytest.mark.parametrize("how", [*WAYS, "through data"])
def test_weights_may_change_between_calls(how):
    lm, twin = tiny_lm(1), tiny_lm(1)
    before = written(lm)
    for changed in (lm, twin):
        change(changed.network.layers[0].mlp, how)
    with native.twins_only():
        expected = written(twin)
    assert expected != before
    assert written(lm) == expected


@pytest.mark.parametrize("how", WAYS)
def test_weights_may_change_while_a_request_is_under_way(how):
    """At a block's start at the latest."""

    def run() -> list[int]:
        lm = tiny_lm(1)
        engine = dlm.Engine(lm, cache="dual")
        engine.add_request([5, 6, 7], gen_length=32, block_length=8, steps=32)
        for step in range(32):
            if step == 8:
                change(lm.network.layers[1].mlp, how)
            events = engine.step()
        assert events[-1].result is not None
        return events[-1].result.tokens

    found = run()
    with native.twins_only():
        assert found == run()


def test_copies_are_made_once_for_a_network_and_forgotten_with_it(monkeypatch):
    lm, made = tiny_lm(1), []
    original = native.panels
    monkeypatch.setattr(native, "panels", lambda w: made.append(w.shape) or original(w))
    written(lm)
    first = len(made)
    assert first > 0
    written(lm)
    assert len(made) == first
    with torch.no_grad():
        lm.network.layers[0].attn.o_proj.weight.mul_(2)
    written(lm)
    assert len(made) == first + 1


def test_an_engine_keeps_the_copies_it_points_to():
    lm = tiny_lm(1)
    fused = Fused(lm.network)
    with torch.inference_mode():
        assert fused.usable()
    before = [copy.data_ptr() for copy in fused.kept]
    lm.network.layers[0].mlp.down_proj.weight.data.mul_(2)
    written(lm)  # another engine, which has that copy made anew
    assert [copy.data_ptr() for copy in fused.kept] == before


def test_where_memory_is_short_nothing_is_copied_and_nothing_changes(monkeypatch):
    lm = tiny_lm(1)
    expected = written(lm)
    other = tiny_lm(1)
    monkeypatch.setattr("dlm.inference.fused.SHARE_OF_COPIES", 0.0)
    monkeypatch.setattr(native, "panels", lambda w: pytest.fail("a copy"))
    assert written(other) == expected


def test_a_network_of_another_kind_is_left_to_its_modules():
    assert Fused(tiny_lm().network).usable()
    half = tiny_lm().network.to(torch.bfloat16)
    assert not Fused(half).usable()
    experts = tiny_lm(moe={"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}).network
    assert not Fused(experts).usable()


def test_a_token_that_is_not_in_the_vocabulary_is_told():
    lm = tiny_lm()
    engine = dlm.Engine(lm, cache="dual")
    engine.add_request([1, 2, 3], gen_length=8, block_length=8, steps=8)
    with torch.inference_mode():
        turns = engine.batch.scheduler.schedule()
        layout, fused = Layout(turns, engine.batch.pool, lm.network), Fused(lm.network)
        assert fused.usable()
        with pytest.raises(IndexError, match="token 64 is not in a vocabulary of 64"):
            fused(layout, torch.tensor([1, 2, 64, *[0] * 8]), torch.tensor([3]))


def test_decoding_is_the_same_on_any_number_of_threads():
    lm = tiny_lm(7, hidden_size=64, intermediate_size=200)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(
                tokens(drive(lm, continuations(lm, prompts(6), SamplerConfig(gen_length=16, **RULE), where="")))
            )
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
