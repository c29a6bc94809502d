"""The engine on a GPU that is none: what it makes the host wait for, and that recorded steps decide what launched ones do."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import dlm
from dlm.diffusion.unmask import RULES
from dlm.inference.config import SamplerConfig
from dlm.inference.decoding import infillings
from dlm.kernels.c import binding
from tests.refusals import refused

from . import speculative
from .fake_gpu import FakeGPU, fake_gpu
from .requests import FAMILIES, MIXED, holes, of_rule, prompts, tokens
from .tiny import tiny_lm

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, "n_group": 4, "topk_group": 2}
MOE |= {"num_shared_experts": 1, "expert_bias": True, "score_function": "sigmoid"}
KINDS = FAMILIES | {"llada2": {**FAMILIES["sdar"], "model_type": "llada2_moe", "moe": MOE, "rotary_dim": 4}}
SHORTEST = {"gen_length": 6}
SHORT = {"gen_length": 8, "block_length": 4}
CASES: dict[str, dict[str, Any]] = {
    **{rule: {**SHORT, **of_rule(rule, threshold=0.4, entropy_threshold=1.0, gamma=0.5)} for rule in RULES},
    "temperature": {**SHORT, "temperature": 0.8},
    "truncated": {**SHORT, "temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "guided": {**SHORT, "cfg_scale": 0.5},
    "edited": {**SHORT, "edit_threshold": 0.5},
    "remasked": {**SHORT, "remask_threshold": 0.3},
    "multi_block": {
        "gen_length": 16,
        "block_length": 4,
        "strategy": "multi_block",
        **of_rule("threshold", threshold=0.3),
    },
}
BUDGETS: dict[str, tuple[int, int, int]] = {
    # waits, uploads, launches of a replayed step: beside them, those of the other kernels that decide
    "": (1, 1, 0),
    "credit": (1, 2, 50),  # what it remembers lies with the request, so it is decided launch by launch
    "mixed": (1, 2, 120),  # so are groups of several settings
    # Up go what is drafted from, how drafts are drawn, what is checked, what decides where that is not recorded, and what
    # becomes the draft's context. Its head, its choice (most of it noise) and its context are launched one by one.
    "dflash": (1, 5, 240),
    "dflash alone": (1, 3, 40),
    "dflash drawn": (1, 4, 240),
    "diffusion": (1, 3, 0),
}
"""The most that a step may do once its bucket is recorded; a name that is not here is held to the first line."""


def checked(gpu: FakeGPU, name: str) -> None:
    """No step waits, uploads or launches more than its budget; pinned memory is for new buckets only."""
    waits, uploads, launches = BUDGETS.get(name, BUDGETS[""])
    for step in gpu.steps:
        assert len(step.waits) <= waits and step.uploads <= uploads, (name, step)
        assert all("transfers.py" in wait for wait in step.waits[:1]), step.waits
        assert not step.replays or step.captures or step.launches <= launches, (name, step)


def decoded(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], dlm.LM],
    run: Callable[[dlm.Engine], Any],
    twins: str = "reference",
    **engine: Any,
) -> tuple[Any, FakeGPU]:
    lm = make()
    with fake_gpu(monkeypatch, lm, twins) as gpu:
        return run(dlm.Engine(lm, num_pages=80, **engine)), gpu


def thrice(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], dlm.LM],
    run: Callable[[dlm.Engine], Any],
    name: str,
    **engine: Any,
) -> FakeGPU:
    """The same tokens on the CPU, on the device launch by launch, and replayed; each within its budget."""
    plain = run(dlm.Engine(make(), num_pages=80, kernels="torch", **engine))
    launched, gpu = decoded(monkeypatch, make, run, cuda_graphs=False, **engine)
    assert launched == plain
    for step in gpu.steps:
        waits, uploads, _ = BUDGETS.get(name, BUDGETS[""])
        assert len(step.waits) <= waits and step.uploads <= uploads, (name, step)
    replayed, gpu = decoded(monkeypatch, make, run, **engine)
    assert replayed == plain
    checked(gpu, name)
    return gpu


def of(name: str, count: int = 3) -> Callable[[dlm.Engine], Any]:
    return lambda engine: tokens(engine.generate(prompts(count), **CASES[name]))


@pytest.mark.parametrize("rule", [*RULES, "temperature", "truncated", "guided", "edited", "remasked", "multi_block"])
def test_a_step_waits_once(rule, monkeypatch):
    gpu = thrice(monkeypatch, tiny_lm, of(rule), rule)
    assert any(step.replays for step in gpu.steps)


@pytest.mark.parametrize("family", KINDS)
def test_families(family, monkeypatch):
    def make() -> dlm.LM:
        lm = tiny_lm(**KINDS[family])
        return lm.to("bfloat16") if family == "llada2" else lm

    settings = {"gen_length": 6} if family == "llama" else SHORT

    def run(engine: dlm.Engine) -> Any:
        return tokens(engine.generate(prompts(3), **settings))

    gpu = thrice(monkeypatch, make, run, family)
    assert any(step.replays for step in gpu.steps)


def test_steps_that_decide_nothing_do_not_write_what_is_being_sent(monkeypatch):
    def run(engine: dlm.Engine) -> Any:
        return tokens(engine.generate([[*range(1, 50)]], **SHORT))

    gpu = thrice(monkeypatch, partial(tiny_lm, **FAMILIES["sdar"]), run, "", max_num_tokens=16)
    assert sum(not step.waits for step in gpu.steps) >= 2  # the prompt, in pieces


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("refresh", [{}, {"refresh_interval": 3}])
def test_caches(cache, refresh, monkeypatch):
    thrice(monkeypatch, tiny_lm, of("threshold"), cache, cache=cache, **refresh)


@pytest.mark.parametrize("settings", [{}, {"block_length": 2}, {"block_length": 1, "strategy": "multi_block"}], ids=str)
def test_infilling(settings, monkeypatch):
    def run(engine: dlm.Engine) -> Any:
        work = infillings(engine.lm, holes(4), SamplerConfig(steps=4, **settings), where="")
        return tokens(engine.run(work))

    thrice(monkeypatch, tiny_lm, run, "infilling", cache="dual")


def test_requests_of_several_kinds_together(monkeypatch):
    def run(engine: dlm.Engine) -> Any:
        names = [engine.add_request(prompt, **MIXED[i % 3]) for i, prompt in enumerate(prompts(6))]
        found = {event.request_id: event.result for event in engine.stream() if event.result is not None}
        return [found[name].tokens for name in names]

    thrice(monkeypatch, tiny_lm, run, "mixed")


def test_confidence_needs_no_second_wait(monkeypatch):
    seen = []

    def run(engine: dlm.Engine) -> Any:
        names = [engine.add_request(prompt, confidence=True, **CASES["temperature"]) for prompt in prompts(3)]
        events = [event for event in engine.stream() if event.request_id in names]
        seen.append([event.confidence for event in events if event.confidence])
        return [event.tokens for event in events]

    thrice(monkeypatch, tiny_lm, run, "confidence")
    assert seen[0] and all(
        torch.allclose(torch.tensor(a), torch.tensor(b)) for x in seen for a, b in zip(x, seen[0], strict=True)
    )


@pytest.mark.parametrize("name", ["ngram", "self"])
def test_drafts_of_the_engine_itself(name, monkeypatch):
    shape = KINDS["llada"] if name == "self" else KINDS["llama"]
    settings = SHORT if name == "self" else {"gen_length": 10, "temperature": 0.7}

    def run(engine: dlm.Engine) -> Any:
        return tokens(engine.generate([[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 5, 6, 5, 6]], **settings))

    thrice(monkeypatch, lambda: tiny_lm(**shape), run, name, draft=name)


@pytest.mark.parametrize("verify", ["greedy", "match", "reject"])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "sliding", "narrow", "first", "diffusion", "ngram"])
def test_drafts_of_a_network(kind, verify, monkeypatch):
    """What is drafted goes from the draft to the target on the device: the host reads both with the target's answers."""
    warm = {} if verify == "greedy" else {"temperature": 0.8, "verify": verify, "seed": 3}
    plain, there = ([], [])
    for found in (plain, there):
        lm = speculative.target(0)
        draft = speculative.draft_of(kind, lm, 1, block_size=5)

        def run(engine: dlm.Engine, found: list = found) -> Any:
            names = [engine.add_request(prompt, **SHORTEST, **warm) for prompt in speculative.small(3)]
            other = (
                {} if verify == "match" else {"draft": False, "temperature": 0.8}
            )  # settings of its own, or no draft
            names.append(engine.add_request([1, 2, 1, 2, 1], **SHORTEST, **other))
            results = {event.request_id: event.result for event in engine.stream() if event.result is not None}
            found += [(results[name].tokens, results[name].accepted) for name in names]

        if found is plain:
            run(dlm.Engine(lm, num_pages=80, kernels="torch", draft=draft))
            continue
        with fake_gpu(monkeypatch, lm) as gpu:
            for network in (draft, getattr(draft, "rest", None), getattr(draft, "network", None)):
                if isinstance(network, torch.nn.Module):
                    gpu.move(network)
            run(dlm.Engine(lm, num_pages=80, draft=draft))
    assert there == plain and any(accepted for _, accepted in there)
    waits, uploads, _ = BUDGETS["diffusion" if kind in ("diffusion", "ngram") else "dflash"]
    assert all(len(step.waits) <= waits and step.uploads <= uploads for step in gpu.steps), gpu.steps
    assert all("transfers.py" in wait for step in gpu.steps for wait in step.waits)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_and_the_steps_that_check_them_are_recorded(temperature, count, monkeypatch):
    def run(engine: dlm.Engine) -> Any:
        results = engine.generate(speculative.small(count), gen_length=24, temperature=temperature, seed=3)
        return [(result.tokens, result.accepted) for result in results]

    found = []
    for cuda_graphs in (None, False, True):
        lm = speculative.target(0)
        draft = speculative.draft_of("dflash", lm, 1, block_size=5)
        if cuda_graphs is None:
            found.append(run(dlm.Engine(lm, num_pages=80, kernels="torch", draft=draft)))
            continue
        with fake_gpu(monkeypatch, lm) as gpu:
            gpu.move(draft)
            engine = dlm.Engine(lm, num_pages=80, draft=draft, cuda_graphs=cuda_graphs, deterministic=True)
            found.append(run(engine))
    assert found[0] == found[1] == found[2] and any(max(accepted) > 1 for _, accepted in found[0])
    of_target, of_draft = engine.batch.stepper.compute.graphs, engine.batch.drafter.graphs
    for graphs in (of_target, of_draft):
        assert 0 < graphs.captures <= len(graphs.recorded) <= 6 and graphs.replays > graphs.captures
    both = [step for step in gpu.steps if step.replays == 2 and not step.captures]
    waits, uploads, launches = BUDGETS["dflash drawn" if temperature else "dflash alone"]
    print(len(gpu.steps), len(both), max(step.launches for step in both), max(step.uploads for step in both))
    assert len(both) >= len(gpu.steps) / 2
    for step in both:
        assert len(step.waits) <= waits and step.uploads <= uploads and step.launches <= launches


def test_the_target_sees_tokens_that_only_the_device_knows(monkeypatch):
    lm, given, settings = speculative.target(0), speculative.small(3), {"gen_length": 20}
    plain, drafter = speculative.plain(lm, given, **settings), speculative.told(lm, given, **settings)
    propose = drafter.propose

    def hidden(wishes: Any) -> Any:
        found = [(guess, torch.from_numpy(guess.tokens).to("cuda")) for guess in propose(wishes)]
        return [replace(guess, tokens=0 * guess.tokens, there=there) for guess, there in found]

    monkeypatch.setattr(drafter, "propose", hidden)
    with fake_gpu(monkeypatch, lm):
        results = dlm.Engine(lm, num_pages=80, draft=drafter).generate(given, request_ids=["0", "1", "2"], **settings)
    assert tokens(results) == plain and all(len(result.accepted) <= 2 for result in results)


# ---- captures


CAPTURED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], int]] = {
    # family, requests, settings, engine's settings, the most graphs
    "llada dual 1": ("llada", 1, {"gen_length": 32, "block_length": 8, "steps": 32}, {"cache": "dual"}, 3),
    "llada dual 8": ("llada", 8, {"gen_length": 32, "block_length": 8, "steps": 32}, {"cache": "dual"}, 6),
    "llada dual 64": ("llada", 64, {"gen_length": 16, "block_length": 8, "steps": 16}, {"cache": "dual"}, 12),
    "sdar 4": ("sdar", 8, {"gen_length": 24, "block_length": 4, "steps": 24}, {}, 6),
    "sdar 32": ("sdar", 8, {"gen_length": 64, "block_length": 32, "steps": 32}, {}, 8),
    "multi_block": ("llada", 4, {**CASES["multi_block"], "gen_length": 32}, {"cache": "dual"}, 10),
    "guided": ("llada", 4, {**CASES["guided"], "gen_length": 24, "steps": 24}, {"cache": "dual"}, 6),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_graph_serves_all_steps_of_a_size(name, monkeypatch):
    family, count, settings, engine, most = CAPTURED[name]

    def run(made: dlm.Engine) -> Any:
        return tokens(made.generate(prompts(count), **settings))

    def make() -> dlm.LM:
        return tiny_lm(**KINDS[family])

    launched, _ = decoded(monkeypatch, make, run, cuda_graphs=False, deterministic=True, **engine)
    replayed, gpu = decoded(monkeypatch, make, run, deterministic=True, **engine)
    assert replayed == launched
    captures, replays = (sum(getattr(step, what) for step in gpu.steps) for what in ("captures", "replays"))
    print(f"{name}: {len(gpu.steps)} steps, {captures} graphs, {replays} replays")
    assert 0 < captures <= most and replays >= len(gpu.steps) / 2


def test_warming_up_leaves_nothing_to_record_and_nothing_behind(monkeypatch):
    settings, lm, told = {"gen_length": 16, "block_length": 8, "steps": 16}, tiny_lm(), []
    with fake_gpu(monkeypatch, lm) as gpu:
        engine = dlm.Engine(lm, cache="dual", num_pages=80, max_num_requests=4)
        assert engine.warm_up(lengths=(8,), progress=lambda *at: told.append(at), **settings) >= 3
        stats, warm = engine.stats(), len(gpu.steps)
        assert told == [(1, 3), (2, 3), (3, 3)]
        assert stats.nfe == stats.finished == stats.tokens == stats.pages_used == 0
        engine.generate([[5] * 8] * 4, **settings)
        assert sum(step.captures for step in gpu.steps[:warm]) and not any(step.captures for step in gpu.steps[warm:])
        assert all(step.replays and not step.launches and not step.pinned for step in gpu.steps[warm:])


LAYER = {"llada": 8, "Dream": 8, "sdar": 8, "llama": 8, "llada2": 14}
"""Launches of a layer of a block step of at most 64 rows: matrix products, kernels, and torch's own operations that are no
views. One more where a context of more than 256 keys may be cut, and one more each for gate and up of more rows."""


@pytest.mark.parametrize("family", LAYER)
def test_launches_of_a_layer(family, monkeypatch):
    special = {"qk_norm": True} if family in ("sdar", "llada2") else {"qkv_bias": True} if family == "Dream" else {}
    settings, found = {"gen_length": 3} if family == "llama" else SHORT, []

    def run(engine: dlm.Engine) -> Any:
        return engine.generate(prompts(1), **settings)

    for layers in (2, 3):
        shape = KINDS[family] | {"num_hidden_layers": layers} | special
        _, gpu = decoded(monkeypatch, partial(tiny_lm, **shape), run, cuda_graphs=False)
        found.append(min(step.launches for step in gpu.steps))
    print(family, found[1] - found[0])
    assert found[1] - found[0] <= LAYER[family]


def test_too_many_pages_for_what_is_left(monkeypatch):
    def none_left(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("dlm.inference.engine.PagePool", none_left)
    refused("memory on cpu: .* it has not so much left. Lower num_pages \\(9\\)", dlm.Engine, tiny_lm(), num_pages=9)


@pytest.mark.skipif(binding.unavailable() is not None, reason="there is no C compiler")
@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_padding_changes_no_token_where_c_computes(family, monkeypatch):
    make = partial(tiny_lm, **KINDS[family])
    settings = {**SHORT, "temperature": 0.9}

    def run(engine: dlm.Engine) -> Any:
        names = [engine.add_request(prompt, confidence=True, **settings) for prompt in prompts(5)]
        found = {event.request_id: event.result for event in engine.stream() if event.result is not None}
        return [found[name].tokens for name in names], [found[name].nfe for name in names]

    launched, _ = decoded(monkeypatch, make, run, "c", cuda_graphs=False, deterministic=True)
    replayed, gpu = decoded(monkeypatch, make, run, "c", deterministic=True)
    assert replayed == launched and any(step.replays for step in gpu.steps)
