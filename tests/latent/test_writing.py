"""Decoding: `dlm.generate`, batches, prompts, seeds, blocks, traces, and what a latent model refuses by name."""

import pytest
import torch

import dlm
from dlm.data.tokenizer import load_tokenizer
from dlm.evaluation.bound import measure_bound
from dlm.latent.lm import LatentLM
from dlm.models.finding import find_tokenizer
from tests.latent.tiny import IDS, model
from tests.refusals import refused

WAYS = [
    {},
    {"solver": "heun"},
    {"solver": "sde"},
    {"cfg_scale": 1.5},
    {"temperature": 1.0, "top_k": 5, "solver": "euler", "num_samples": 3},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", [{}, {"block_length": 2}, {"path": "vp"}])
def test_a_request_is_the_same_in_any_batch(way, fields):
    lm = model(**fields)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12], [13], [14, 15, 16, 17, 18, 19, 20], [21, 22, 23, 24]]
    settings = {"gen_length": 12, "steps": 12, "seed": 3, **way}
    together = dlm.generate(lm, prompts, **settings)
    for size in (1, 2):
        assert dlm.generate(lm, prompts, batch_size=size, **settings) == [
            dlm.Generation(**vars(result)) for result in together
        ]
    count = settings.get("num_samples", 1)
    alone = dlm.generate(lm, [prompts[3]], **settings)
    assert [r.tokens for r in alone] == [r.tokens for r in together[3 * count : 4 * count]]
    assert [r.steps for r in alone] == [r.steps for r in together[3 * count : 4 * count]]


def test_seeds_and_samples_differ_and_return():
    lm = model()
    first, again = (dlm.generate(lm, [[5, 6, 7]], gen_length=15, steps=4, seed=1) for _ in range(2))
    assert first == again
    assert dlm.generate(lm, [[5, 6, 7]], gen_length=15, steps=4, seed=2)[0].tokens != first[0].tokens
    several = dlm.generate(lm, [[5, 6, 7]], gen_length=15, steps=4, seed=1, solver="euler", num_samples=3)
    assert len({tuple(r.tokens) for r in several}) == 3 and several[0].tokens == first[0].tokens
    assert [r.request_id for r in several] == ["0/0", "0/1", "0/2"]


@pytest.mark.parametrize(
    ("way", "nfe"),
    [({}, 6), ({"solver": "heun"}, 11), ({"solver": "sde"}, 6), ({"cfg_scale": 2.0}, 12), ({"steps": 1}, 1)],
)
def test_nfe_counts_forwards_of_the_denoiser(way, nfe, monkeypatch):
    lm, calls = model(), []
    forward = type(lm.network.denoiser).forward
    monkeypatch.setattr(type(lm.network.denoiser), "forward", lambda *a: calls.append(1) or forward(*a))
    (result,) = dlm.generate(lm, [[5, 6, 7, 8]], gen_length=14, **{"steps": 6, **way})
    assert result.nfe == nfe == len(calls)


def test_lengths_are_in_tokens_and_prompts_stay(monkeypatch):
    lm, seen = model(), []
    lm.network.decode = lambda z, length, decode=lm.network.decode: seen.append(z.clone()) or decode(z, length)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    for length in (1, 5, 14):
        seen.clear()
        (result,) = dlm.generate(lm, [prompt], gen_length=length, steps=3)
        assert result.finish_reason == "stop" or len(result.tokens) == length
        clean = lm.network.encode(torch.tensor([prompt[:6]]))
        assert all(torch.allclose(z[:, :2], clean, atol=1e-5) for z in seen) and len(seen) == 3
        assert all(0 <= step < 3 for step in result.steps) and len(result.steps) == len(result.tokens)


def test_end_of_text_ends_blocks_and_nothing_runs_after_it():
    lm = model(block_length=2)  # six tokens a block
    lm.network.logits = lambda states: torch.nn.functional.one_hot(torch.ones(states.shape[:2]).long(), 48).float()
    (result,) = dlm.generate(lm, [[]], gen_length=18, steps=12)
    assert (result.tokens, result.finish_reason, result.nfe) == ([1], "stop", 4)  # 4 steps a block
    (open_ended,) = dlm.generate(lm, [[]], gen_length="auto", max_gen_length=36, steps=4)
    assert (open_ended.tokens, open_ended.nfe) == ([1], 1)


def test_blocks_do_not_depend_on_those_that_follow():
    lm = model(block_length=2)
    short, long = (dlm.generate(lm, [[5, 6]], gen_length=n, steps=s)[0] for n, s in ((12, 9), (18, 12)))
    assert long.tokens[:12] == short.tokens[:12]


def test_a_trace_is_the_decoded_tokens_by_step(tmp_path):
    lm, canvases = model(), []
    with dlm.TraceStore(tmp_path / "t.db") as store:
        (result,) = dlm.generate(
            lm, [[5, 6, 7]], gen_length=15, steps=6, trace=store, request_ids=["a"],
            on_step=lambda event: canvases.append(event.canvas[0].tolist()),
        )  # fmt: skip
    with dlm.TraceStore(tmp_path / "t.db") as store:
        trace = store["a"]
        assert [trace.state(k + 1).tolist() for k in range(6)] == canvases
        assert trace.state(6)[3 : 3 + len(result.tokens)].tolist() == result.tokens
        kinds = {event.kind for event in trace.events()}
        assert kinds == {0, 2}  # set, then replaced
        last = {event.position: event.step for event in trace.events()}
        assert [last[3 + i] for i in range(len(result.tokens))] == result.steps
        assert trace.meta["kind"] == "latent" and trace.meta["nfe"] == 6


def test_a_perceiver_writes_from_nothing_and_only_end_of_text_ends_it():
    lm = model(kind="perceiver", latents=4)
    (result,) = dlm.generate(lm, [[]], gen_length=20, steps=2)
    assert result.nfe == 2 and (len(result.tokens) == 20 or result.tokens[-1] == 1)
    refused("prompt 0: model 'tiny' is a perceiver", dlm.generate, lm, [[5]], gen_length=4)


def test_one_step_of_the_adapter_needs_one():
    lm = model(stage="adapter")
    (result,) = dlm.generate(lm, [[5, 6, 7]], gen_length=9, solver="adapter")
    assert result.nfe == 1 and set(result.steps) == {0}
    refused('solver = "adapter" is one step', dlm.generate, lm, [[5]], gen_length=4, solver="adapter", steps=3)
    refused("'tiny' has none: train stage", dlm.generate, model(), [[5]], gen_length=4, solver="adapter")


LATENT = "model 'tiny' is a latent diffusion model"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": "dual"}, "cache = 'dual' is not read: " + LATENT),
        ({"rule": "margin"}, "rule = 'margin' is not read: " + LATENT),
        ({"draft": "ngram"}, "draft = 'ngram' is not read: " + LATENT),
        ({"strategy": "multi_block"}, "strategy = 'multi_block' is not read"),
        ({"edit_threshold": 0.5}, "edit_threshold = 0.5 is not read"),
        ({"block_length": 4}, "block_length = 4 is not read: model 'tiny' writes all at once"),
        ({"gen_length": "auto"}, "gen_length = \"auto\" adds blocks, and model 'tiny' has none"),
        ({"gen_length": 40}, "with gen_length = 40 that is 41 positions"),
        ({"solver": "rk4"}, 'solver = "rk4"'),
        ({"num_samples": 2}, "num_samples = 2 is only read with a temperature above 0, .* or a solver"),
    ],
)
def test_settings_it_does_not_read_are_refused_by_name(settings, message):
    refused(message, dlm.generate, model(), [[5]], **{"gen_length": 8, **settings})


def test_what_needs_masked_tokens_refuses_it_by_name(tmp_path):
    lm = model()
    for call in (
        lambda: dlm.infill(lm, [[5, 40, 6]]),
        lambda: dlm.Engine(lm),
        lambda: dlm.score(lm, ["a"]),
        lambda: dlm.save(lm, tmp_path / "x"),
        lambda: dlm.load_draft("pico", lm),
        lambda: dlm.models.convert(lm, "causal"),
        lambda: dlm.replay.verify(lm, None),
    ):
        refused(LATENT, call)
    refused("is an autoencoder alone", dlm.generate, model(stage="autoencoder"), [[5]], gen_length=4)
    refused("block_length = 4: model 'tiny' has blocks of 6", dlm.generate, model(block_length=2), [[5]], gen_length=12, block_length=4)  # fmt: skip


def test_other_models_do_not_read_a_solver():
    refused("solver = 'heun' is only read by latent models", dlm.generate, dlm.load("sudoku"), [[5]], solver="heun")


@pytest.mark.parametrize("fields", [{}, {"kind": "perceiver", "latents": 4}, {"stage": "adapter"}, {"block_length": 2}])
def test_a_saved_model_is_the_same(tmp_path, fields):
    lm = model(**fields)
    lm.save(tmp_path / "m")
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"config.json", "model.safetensors"}
    found = dlm.load(tmp_path / "m")
    assert isinstance(found, LatentLM) and found.network.shape == lm.network.shape
    assert found.config == lm.config and found.config.mask_token_id == IDS["mask_token_id"]
    ours, theirs = lm.network.state_dict(), found.network.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert dlm.generate(found, [[]], gen_length=12)[0] == dlm.generate(lm, [[]], gen_length=12)[0]
    half = dlm.load(tmp_path / "m", dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and len(dlm.generate(half, [[]], gen_length=12)[0].tokens) > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"channels": 6', '"channels": 7', "its weights' file .*config.json asks for"),
        ('"kind": "chunk"', '"kind": "chunks"', "latent.kind"),
        ('"vocab_size": 48', '"vocab_size": 0', "vocab_size = 0"),
        ('"stage": "flow"', '"stage": "autoencoder"', "has 'denoiser"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, old, new, message):
    model().save(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    refused(message, dlm.load, tmp_path / "m")


def test_the_held_out_bound_is_measured_as_of_other_models(tmp_path):
    lm = model()
    tokenizer = load_tokenizer(find_tokenizer("sudoku"))
    sudoku = LatentLM(lm.network, tokenizer, "tiny")
    from dlm.data.config import DataConfig

    found = measure_bound(sudoku, DataConfig(source="sudoku", sudoku_pool=5), length=81, sequences=2, draws=2)
    assert found.nats_per_token > 0 and found.nats_error is not None
