"""Trajectory masking: masks against a brute-force reading of the trajectory, the loss against float64, traces into training."""

import json

import numpy as np
import pytest
import torch

import dlm
from dlm.cli import infer
from dlm.config import load
from dlm.errors import UserError
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.loop import train
from dlm.training.masking.trajectory import TrajectoryMasking
from dlm.training.objective import Objective
from dlm.training.run import Run
from dlm.training.sections import ObjectiveConfig
from tests.diffusion.enumeration import MASK, tiny_network
from tests.inference.tiny import text_lm
from tests.refusals import refused

# Two prompt tokens; then blocks of three as a decoder with two steps each, and a last one of two, filled them; padding.
ORDER = [-1, -1, 1, 0, 0, 2, 3, 2, 4, 5, -1]
PROMPT = [True, True] + [False] * 9
IDS = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]


def batch(rows: int, step: int = 0, progress: float = 0.0, order: list[int] = ORDER) -> Batch:
    def tensor(values: list) -> torch.Tensor:
        return torch.tensor([values]).repeat(rows, 1)

    return Batch(tensor(IDS), ~tensor(PROMPT), torch.arange(rows), step, rows, progress, tensor(order))


def masking(shape: dict | None = None, **options) -> TrajectoryMasking:
    config = ObjectiveConfig(masking="trajectory", **{"block_length": 3, **options})
    return TrajectoryMasking(config, tiny_network(**(shape or {})).config, seed=0)


def decoder_states(size: int, aligned: bool) -> dict[tuple[int, ...], list[tuple[bool, ...]]]:
    """By block: what of it was masked at each point of the recorded run, its first state first."""
    places = [i for i, step in enumerate(ORDER) if step >= 0]
    blocks = [places[start : start + size] for start in range(0, len(places), size)]
    if aligned:
        blocks = [[i for i in places if i // size == number] for number in range(len(ORDER))]
    states: dict[tuple[int, ...], list[tuple[bool, ...]]] = {}
    for block in map(tuple, filter(None, blocks)):
        points = (tuple(i in block and ORDER[i] >= step for i in range(len(ORDER))) for step in range(max(ORDER) + 1))
        states[block] = [point for point in dict.fromkeys(points) if any(point)]
    return states


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 20])
def test_masks_are_the_states_of_the_decoder_and_all_of_them_occur(size, aligned):
    shape = {"attention": "block_causal", "block_length": size} if aligned else {}
    block, masked, later = masking(shape, block_length=size, max_mask_ratio=1.0).draw(batch(400))
    states, seen = decoder_states(size, aligned), set()
    for b, m, after in zip(block.tolist(), masked.tolist(), later.tolist(), strict=True):
        places = tuple(i for i, inside in enumerate(b) if inside)
        assert tuple(m) in states[places]
        assert after == [i > places[-1] and not PROMPT[i] for i in range(len(ORDER))]
        seen.add((places, tuple(m)))
    assert seen == {(places, state) for places, points in states.items() for state in points}


BY_HAND = {0.01: {(2,), (6,), (9,)}, 0.5: {(2, 3, 4), (5, 6, 7), (9,)}, 1.0: {(2, 3, 4), (5, 6, 7), (8, 9)}}


@pytest.mark.parametrize("ratio", BY_HAND)
def test_the_point_is_the_last_at_which_so_much_of_the_block_was_masked(ratio):
    _, masked, _ = masking(min_mask_ratio=ratio, max_mask_ratio=ratio).draw(batch(100))
    assert {tuple(np.flatnonzero(row)) for row in masked.numpy()} == BY_HAND[ratio]


def test_ratios_and_blocks_grow_with_the_run():
    curriculum = masking(block_length=2, max_block_length=8, min_mask_ratio=0.25, max_mask_ratio=1.0)
    order = [-1, -1, 0, 1, 2, 3, 4, 5, 6, 7, -1]
    for progress, size, low in ((0.0, 2, 0.25), (0.5, 5, 0.625), (1.0, 8, 1.0)):
        block, masked, _ = curriculum.draw(batch(300, progress=progress, order=order))
        assert block.sum(-1).max() == size
        share = masked.sum(-1) / block.sum(-1)
        assert share.min() >= low and share.max() == 1  # one token a step: every share of a block is a point of it
        assert progress == 1 or abs(share.mean() - (low + 1) / 2) < 0.3


def test_draws_have_addresses():
    drawn = masking().draw(batch(64, step=3))
    part = masking().draw(batch(64, step=3).rows(20, 30))
    assert all(torch.equal(a[20:30], b) for a, b in zip(drawn, part, strict=True))
    assert not torch.equal(drawn[1], masking().draw(batch(64, step=4))[1])


def by_float64(network, rows: Batch, options: dict) -> dict[str, torch.Tensor]:
    """The loss as d3LLM states it, from the raw logits in float64, one token at a time."""
    block, masked, later = (x.tolist() for x in masking(**options).draw(rows))
    parts = {"masked": torch.zeros((), dtype=torch.float64), "entropy": torch.zeros((), dtype=torch.float64)}
    for b, m, after in zip(block, masked, later, strict=True):
        rest = [inside and not missing for inside, missing in zip(b, m, strict=True)]
        for asked in (m, rest) if options.get("complementary") else (m,):
            canvas = [MASK if a or hidden else i for i, a, hidden in zip(IDS, asked, after, strict=True)]
            logits = network(torch.tensor([canvas]))[0].double()[:, :MASK]
            for i in np.flatnonzero(asked):
                weight, p = 1 / sum(asked) / len(block), logits[i].exp() / logits[i].exp().sum()
                parts["masked"] = parts["masked"] - weight * p[IDS[i]].log()
                if p.argmax() == IDS[i]:
                    cold = p**2 / (p**2).sum()  # temperature 1/2
                    parts["entropy"] = parts["entropy"] - 2 * weight * (cold * cold.log()).sum()
    return parts


@pytest.mark.parametrize("options", [{}, {"complementary": True}, {"block_length": 2}], ids=str)
def test_the_loss_and_its_gradient_are_the_formulas_in_float64(options):
    network = tiny_network()
    config = ObjectiveConfig(masking="trajectory", entropy_weight=2.0, **{"block_length": 3, **options})
    objective = Objective(network, config, seed=0, length=len(IDS))
    rows = batch(12, step=5)
    parts, stated = objective(rows), by_float64(network, rows, options)
    assert parts.keys() == stated.keys()
    for name in parts:
        assert stated[name] > 0 and parts[name].item() == pytest.approx(stated[name].item(), rel=1e-5)
    wanted = torch.autograd.grad(sum(stated.values()), list(network.parameters()))
    sum(parts.values()).backward()
    for parameter, gradient in zip(network.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_the_loss_does_not_depend_on_how_the_batch_is_split():
    config = ObjectiveConfig(masking="trajectory", block_length=3, complementary=True, entropy_weight=2.0)
    objective = Objective(tiny_network(), config, seed=0, length=len(IDS))
    whole = objective(batch(12))
    parts = [objective(batch(12).rows(i, i + 3)) for i in range(0, 12, 3)]
    for name, value in whole.items():
        assert sum(part[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs block_length"),
        ({"block_length": 4, "max_block_length": 2}, "max_block_length = 2 is less than block_length = 4"),
        ({"block_length": 4, "min_mask_ratio": 0.9}, "min_mask_ratio = 0.9 exceeds max_mask_ratio = 0.8"),
        ({"masking": "random", "complementary": True}, "complementary = True is only read with masking = trajectory"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, message):
    refused(message, ObjectiveConfig, error=ValueError, **{"masking": "trajectory", **options})


PROMPTS = ["hello", "ab", "x = ", "import"]


def run_config(folder, **more: str) -> TrainConfig:
    """Three steps on the traces in `folder`."""
    train = {"out": str(folder / "run"), "init_from": str(folder / "model"), "steps": "3", "batch_size": "2"}
    train |= {"length": "24", "warmup_steps": "0", "device": "cpu"}
    data = {"source": "traces", "paths": json.dumps([str(folder / "traces.db")]), "heldout_fraction": "0"}
    objective = {"masking": "trajectory", "block_length": "4", "max_block_length": "8", "entropy_weight": "2"}
    sections = {"train": train, "data": data, "objective": objective}
    settings = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    settings |= {"eval.sequences": "0", "checkpoint.every": "0", "log.progress": "false"}
    return load(TrainConfig, [], settings | {key.replace("__", "."): value for key, value in more.items()})


def test_what_dlm_infer_decodes_trains_the_next_model(tmp_path, capsys):
    text_lm(attention="bidirectional").save(tmp_path / "model")
    lm = dlm.load(tmp_path / "model", device="cpu")
    words = ["--model.name", str(tmp_path / "model"), "--trace", "--trace.store", str(tmp_path / "traces.db"), "--json"]
    words += ["--sampler.gen_length", "16", "--sampler.block_length", "8", "--sampler.rule", "entropy_threshold"]
    assert infer.main([*words, *(word for prompt in PROMPTS for word in ("--prompt", prompt))]) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = Run(run_config(tmp_path, train__batch_size="4"))._batch()
    expected = {}
    for prompt, result in zip(PROMPTS, made, strict=True):
        ids = lm.encode(prompt)
        expected[*ids, *result["tokens"]] = [-1] * len(ids) + result["steps"]
    for ids, order, answer in zip(rows.input_ids.tolist(), rows.order.tolist(), rows.answer.tolist(), strict=True):
        steps = next(steps for key, steps in expected.items() if tuple(ids[: len(key)]) == key)
        assert order[: len(steps)] == steps and answer == [step >= 0 for step in steps] + [True] * (24 - len(steps))
    result = train(run_config(tmp_path))
    assert len(result.losses) == 3 and dlm.load(result.folder, device="cpu").config == lm.config


def test_trajectory_masking_needs_traces(tmp_path):
    with pytest.raises(UserError, match='masking = trajectory needs data.source = "traces", not "stdlib"'):
        run_config(tmp_path, data__source="stdlib", data__paths="[]")
