"""`best_of`: of several fillings the one with the largest pseudo-likelihood."""

from dataclasses import replace

import pytest
import torch

import dlm
from dlm.inference.candidates import APART, NEAR, WARMTH
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.decoding import infillings
from dlm.inference.generation import run
from dlm.inference.recommended import recommended
from dlm.inference.request import Interrupted
from dlm.replay import verify
from dlm.serving.config import ServeConfig
from tests.refusals import refused

from .requests import FAMILIES
from .tiny import text_lm

PROMPTS = ["def f(x): [MASK:5] y", "so [MASK:2], then [MASK:3] and on", "to the end [MASK:4]"]


def model(name: str = "llada") -> dlm.LM:
    return text_lm(**FAMILIES[name], seed=2, spread=0.5)


def candidates(lm: dlm.LM, prompt: str, count: int, temperature: float) -> list[dlm.Generation]:
    """The fillings that the choice is among, each decoded as a request of its own."""
    settings = SamplerConfig(temperature=temperature, seed=3, steps=4)
    [first] = infillings(lm, prompt, settings, where="test")
    several = [first]
    for number in range(1, count):
        drawn = first.settings.model_copy(update={"temperature": temperature or WARMTH})
        several.append(replace(first, settings=drawn, request=replace(first.request, sample=number * APART)))
    return [run(lm, [one], EngineConfig(), 1)[0] for one in several]


def likelihood(lm: dlm.LM, prompt: str, filling: dlm.Generation) -> float:
    """By the formula, a token at a time: the sum of log p of each token in and near a hole, given all others."""
    [asked] = infillings(lm, prompt, SamplerConfig(), where="test")
    ids, holes = list(asked.request.ids), [at for hole in asked.request.holes for at in hole]
    for at, token in zip(holes, filling.tokens, strict=True):
        ids[at] = token
    total, shift = 0.0, int(lm.config.shifted_logits)
    for at in range(shift, len(ids)):
        if min(abs(at - hole) for hole in holes) <= NEAR:
            shown = torch.tensor([[lm.mask_id if i == at else token for i, token in enumerate(ids)]])
            with torch.no_grad():
                states = lm.network.hidden(shown)
                logits = lm.network.suppress(lm.network.head(states)[0, at - shift])
            total += logits.double().log_softmax(-1)[ids[at]].item()
    return total


@pytest.mark.parametrize("name", ["llada", "Dream", "sdar"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_likeliest_filling_stays(name, temperature):
    lm = model(name)
    found = dlm.infill(lm, PROMPTS, best_of=6, temperature=temperature, seed=3, steps=4)
    places = set()
    for prompt, result in zip(PROMPTS, found, strict=True):
        several = candidates(lm, prompt, 6, temperature)
        scores = [likelihood(lm, prompt, one) for one in several]
        best = scores.index(max(scores))
        places.add(best)
        assert (result.tokens, result.text, result.steps) == (
            several[best].tokens,
            several[best].text,
            several[best].steps,
        )
    assert places != {0}  # the choice matters here


def test_it_depends_on_nothing_beside_the_prompt_and_counts_what_it_took():
    lm = model()
    settings = {"best_of": 4, "seed": 3, "steps": 4}
    together = dlm.infill(lm, PROMPTS, **settings)
    for prompt, result in zip(PROMPTS, together, strict=True):
        [alone] = dlm.infill(lm, prompt, batch_size=1, **settings)
        assert {**alone.to_dict(), "request_id": result.request_id} == result.to_dict()
    [plain] = dlm.infill(lm, PROMPTS[0], seed=3, steps=4)
    judged = NEAR + 5 + len(lm.encode(" y"))  # tokens, a forward for each
    assert together[0].nfe == 4 * plain.nfe + 4 * judged and together[0].tpf == 5 / together[0].nfe


def test_samples_and_lengths_are_chosen_for_each():
    lm = model()
    found = dlm.infill(lm, "ab [MASK:2-4] cd", best_of=3, num_samples=3, temperature=1.0, steps=4)
    assert [one.sample for one in found] == [0, 1, 2] and len({tuple(one.tokens) for one in found}) == 3
    assert {one.request_id for one in found} == {"0/0", "0/1", "0/2"}


def test_only_what_stays_is_recorded_and_replays(tmp_path):
    lm, names = model(), ["a", "b", "c"]
    with dlm.TraceStore(tmp_path / "traces.db") as store:
        found = dlm.infill(lm, PROMPTS, best_of=6, seed=3, steps=4, trace=store, request_ids=names)
        assert len(store) == 3
        for name, result in zip(names, found, strict=True):
            trace = store[name]
            start = len(lm.encode("def f(x): "))
            assert "best_of" not in trace.meta["sampler"] and verify(lm, trace).identical
            assert name != "a" or trace.tokens[start : start + 5].tolist() == result.tokens
        assert WARMTH in {store[name].meta["sampler"]["temperature"] for name in names}


def test_where_each_request_is_decoded_once_it_is_refused():
    lm = model()
    refused("generate\\(\\) continues texts, and best_of = 2 chooses among fillings", dlm.generate, lm, "ab", best_of=2)
    engine = dlm.Engine(lm, num_pages=8)
    said = "add_request\\(\\) decodes each request once, and best_of = 2"
    refused(said, engine.add_request, "a[MASK:2]b", infill=True, best_of=2)
    served = {"model": {"name": "pico"}, "sampler": {"best_of": 2}}
    refused("best_of = 2: each request is decoded once here", ServeConfig.model_validate, served, error=ValueError)
    lm.generation = {"dlm": {"generate": {"best_of": 2}}}
    refused('generate.best_of = 2: is read for holes: move it to "infill"', recommended, lm, "generate")


def test_what_a_model_recommends_holds_for_infill_and_not_for_an_engine():
    lm = model()
    named = dlm.infill(lm, PROMPTS[0], best_of=6, seed=3, steps=4)
    lm.generation = {"dlm": {"infill": {"best_of": 6}}}
    assert dlm.infill(lm, PROMPTS[0], seed=3, steps=4) == named
    with dlm.Engine(lm, num_pages=8) as engine:
        engine.add_request(PROMPTS[0], infill=True, seed=3, steps=4)
        [result] = [event.result for event in engine.stream() if event.result is not None]
    assert result.nfe < named[0].nfe


def test_an_interrupt_while_it_chooses_holds_no_candidates(monkeypatch):
    def broken(*_, **__):
        raise KeyboardInterrupt

    lm = model()
    monkeypatch.setattr("dlm.inference.batch.Batch.step", broken)
    with pytest.raises(Interrupted) as stopped:
        dlm.infill(lm, PROMPTS[0], best_of=2)
    assert stopped.value.results == []
