"""The engine on a GPU: recorded steps decide what launched ones decide, and a request its own whatever the company."""

import pytest

import dlm

from .requests import FAMILIES, prompts, tokens
from .tiny import tiny_lm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llada", "sdar"])
@pytest.mark.parametrize("cache", ["none", "auto", "dual"])
def test_recorded_steps_give_the_tokens_of_launched_ones(family, cache):
    if family == "sdar" and cache == "dual":
        pytest.skip("a block-causal family has the exact cache")
    lm = tiny_lm(**FAMILIES[family], head_dim=64)
    lm.network.to("cuda")
    settings = {"gen_length": 32, "block_length": 8, "steps": 32, "cache": cache}
    plain = tokens(dlm.generate(lm, prompts(9), cuda_graphs=False, **settings))
    engine = dlm.Engine(lm, cache=settings.pop("cache"))
    assert tokens(engine.generate(prompts(9), **settings)) == plain
    graphs = engine.batch.stepper.compute.graphs
    assert graphs is not None and graphs.captures and graphs.replays > engine.stats().nfe / 2


def test_warming_up_leaves_nothing_to_record():
    lm = tiny_lm(head_dim=64)
    lm.network.to("cuda")
    engine = dlm.Engine(lm, cache="dual")
    settings = {"gen_length": 32, "block_length": 8, "steps": 32}
    assert engine.warm_up(batches=(1, 4), lengths=(8,), **settings) > 0
    graphs = engine.batch.stepper.compute.graphs
    assert graphs is not None
    before = graphs.captures
    engine.generate([[1] * 8] * 4, **settings)
    assert graphs.captures == before
