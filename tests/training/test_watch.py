import importlib.util
import json
import sys

import numpy as np
import pytest
import torch

from dlm.training import pictures
from dlm.training.loop import train
from dlm.training.masking import masking_of
from dlm.training.pictures import BLUE, GIVEN, ORANGE, Point, Strip
from dlm.training.run import Run
from dlm.training.snapshots import answers, decode
from dlm.training.watch import Epochs, gradient_norms
from tests.training.runs import config, rows

PLOT = importlib.util.find_spec("matplotlib") is not None
needs_plot = pytest.mark.skipif(not PLOT, reason="needs the extra `plot`")
WATCHED = {"watch__every": "4", "train__length": "24"}
MASKED = {"random": {}, "complementary": {}, "causal": {}, "block": {"objective__block_length": "4"}}


def masked(masking):
    return {"objective__masking": masking, **MASKED[masking]}


@pytest.mark.parametrize("masking", MASKED)
def test_looking_changes_no_loss_and_tells_of_each_look(tmp_path, masking):
    plain = train(config(tmp_path, "plain", train__length="24", **masked(masking)))
    seen = train(config(tmp_path, "seen", **WATCHED, **masked(masking)))
    assert seen.losses == plain.losses and not (plain.folder / "pictures").exists()
    looks = [r for r in rows(seen.folder) if "sample" in r]
    assert [r["step"] for r in looks] == [4, 8]
    norms = [r["grad_norm"] for r in rows(seen.folder) if "loss" in r and r["step"] in (4, 8)]
    groups = [[v for k, v in r.items() if k.startswith("grad_norm/")] for r in looks]
    assert [sum(g**2 for g in group) ** 0.5 for group in groups] == pytest.approx(norms, rel=1e-4)
    assert all(any(k.startswith("loss_by_mask_ratio/") for k in r) for r in looks)
    if PLOT:
        files = {f"step-0000000{step}-{name}.png" for step in (4, 8) for name in ("loss", "strip", "trajectory")}
        assert {f.name for f in (seen.folder / "pictures").iterdir()} == files


def test_gradient_norms_are_those_of_the_optimisers_groups(tmp_path):
    run = Run(config(tmp_path, model__tie_word_embeddings="false"))
    run.network.embed.weight.grad = torch.full_like(run.network.embed.weight, 2.0)
    run.network.norm.weight.grad = torch.tensor([3.0] + [0.0] * 15)
    run.network.layers[0].attn_norm.weight.grad = torch.tensor([4.0] + [0.0] * 15)
    norms = {"embed": 2 * run.network.embed.weight.numel() ** 0.5, "scalar": 5.0}
    assert gradient_norms(run.model) == pytest.approx(norms)


@pytest.mark.parametrize("masking", MASKED)
def test_answers_are_what_the_network_says_of_each_token_asked(tmp_path, masking):
    """Against the definition, in numpy, from logits of one row at a time."""
    run = Run(config(tmp_path, **masked(masking)))
    batch = run._batch()
    c, network = run.config.objective, run.network.eval()
    view = masking_of(c, network.config, 0).views(batch)[0]
    found = answers(network, view)
    loss, right, confidence = (part.numpy() for part in found)
    for b in range(len(batch.index)):
        positions = None if view.positions is None else view.positions[b : b + 1]
        with torch.no_grad():
            logits = network(view.input_ids[b : b + 1], positions, attention=view.attention)[0].numpy()
        logits = logits[: view.targets.shape[1]]
        if masking != "causal" and network.config.shifted_logits:
            logits = np.concatenate([logits[:1], logits[:-1]])
        logits[:, run.model.lm.mask_id] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        asked, target = view.predicted[b].numpy(), view.targets[b].numpy()
        truth = -np.log(p[np.arange(len(target)), target])
        np.testing.assert_allclose(loss[b], np.where(asked, truth, 0), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(confidence[b], np.where(asked, p.max(-1), 0), rtol=1e-3, atol=1e-6)
        assert (right[b] == (asked & (p.argmax(-1) == target))).all()


def test_points_of_training_rows_are_their_mask_ratio_and_their_loss(tmp_path):
    run = Run(config(tmp_path, watch__every="1"))
    batch = run._batch()
    (view,) = masking_of(run.config.objective, run.network.config, 0).views(batch)
    points = run.model.snapshots._points(run.network, run.model.masking, batch, step=3)
    loss, _, _ = answers(run.network, view)
    some = [b for b in range(len(batch.index)) if view.predicted[b].any()]
    assert [p.ratio for p in points] == pytest.approx([view.predicted[b].float().mean().item() for b in some])
    assert [p.loss for p in points] == pytest.approx([loss[b][view.predicted[b]].mean().item() for b in some])


def test_without_matplotlib_numbers_are_logged_and_the_rest_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = train(config(tmp_path, log__progress="true", **WATCHED))
    assert capsys.readouterr().err.count("watch.pictures needs matplotlib: pip install 'dlm[plot]'") == 1
    assert len([r for r in rows(result.folder) if "sample" in r]) == 2 and not (result.folder / "pictures").exists()


@needs_plot
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the extra `tensorboard`")
@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_trackers_get_pictures_numbers_and_the_sample(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = train(config(tmp_path, log__trackers='["tensorboard"]', **WATCHED))
    events = EventAccumulator(str(next(result.folder.rglob("events.out.tfevents*")).parent))
    events.Reload()
    tags = events.Tags()
    assert set(tags["images"]) == {"watch/loss", "watch/strip", "watch/trajectory"}
    assert "grad_norm/hidden" in tags["scalars"] and "sample/text_summary" in tags["tensors"]
    assert events.Images("watch/strip")[-1].step == 8 and not (result.folder / "pictures").exists()


@pytest.mark.parametrize(
    ("masking", "answer", "length"),
    [
        ("random", range(24), 12),  # all of it is answer: its second half
        ("random", range(9, 24), 15),
        ("random", range(3, 7), 4),  # between given tokens: filled in
        ("causal", range(9, 24), 15),
        ("causal", range(3, 7), 12),
        ("block", range(10, 24), 12),  # whole blocks
    ],
)
def test_what_is_decoded_is_the_rows_answer(tmp_path, masking, answer, length):
    run = Run(config(tmp_path, train__length="24", **masked(masking)))
    run.network.config = run.network.config.model_copy(update={"eos_token_id": None})
    ids = run.held_out.batches[0][0][0]
    asked = torch.zeros(24, dtype=torch.bool)
    asked[list(answer)] = True
    found = decode(run.model.lm, ids, asked)
    assert len(found.tokens) == length == len(found.steps) and len(set(found.steps)) == length


def test_epochs_end_where_the_data_goes_round(tmp_path):
    result = train(config(tmp_path, train__steps="40", watch__epochs="true", eval__every="0", train__length="64"))
    run = Run(config(tmp_path, "again", train__length="64"))
    per_epoch = run.loader.stream.samples_per_epoch
    ends = [step for step in range(1, 41) if step * 4 // per_epoch > (step - 1) * 4 // per_epoch]
    told = [r for r in rows(result.folder) if "epoch" in r]
    assert [r["step"] for r in told] == ends and len(ends) >= 2
    assert [r["epoch"] for r in told] == [step * 4 // per_epoch for step in ends]
    assert [r["epoch_tokens"] for r in told] == list(np.diff([0, *ends]) * 4 * 64)
    bounds = {r["step"]: r["bound"] for r in rows(result.folder) if "bound" in r}
    assert [bounds[r["step"]] for r in told] == [r["epoch_bound"] for r in told] and set(bounds) == {*ends, 40}


def test_an_epoch_that_is_stopped_in_goes_on_in_its_figures(tmp_path):
    runs = [Run(config(tmp_path, watch__epochs="true")) for _ in range(2)]
    runs[0].epochs.load_state_dict({"epoch": 2, "tokens": 350, "seconds": 5.0})
    runs[0].optimiser_step()
    runs[0].save_checkpoint()
    runs[1].resume()
    assert runs[1].epochs.state_dict() == runs[0].epochs.state_dict() and runs[1].tokens == runs[0].tokens
    epochs, other = Epochs(True), Epochs(True)
    assert epochs.ended(0, 100, 1.0) == {}
    assert epochs.ended(1, 200, 2.0)["epoch_tokens"] == 200
    other.load_state_dict(json.loads(json.dumps(epochs.state_dict())))
    figures = {"epoch": 2, "epoch_tokens": 150, "epoch_seconds": 3.0, "epoch_tokens_per_second": 50.0}
    assert other.ended(2, 350, 5.0) == figures
    assert Epochs(False).ended(1, 200, 2.0) == {} and Epochs(True).ended(None, 200, 2.0) == {}


def colour(patch):
    from matplotlib.colors import to_hex

    return to_hex(patch.get_facecolor()).upper()


@needs_plot
def test_the_scatter_has_every_row_and_the_mean_of_each_eighth():
    points = [Point(10, 0.05, 1.0), Point(10, 0.1, 3.0), Point(20, 1.0, 4.0)]
    axes = pictures.loss_by_ratio(points).axes[0]
    np.testing.assert_allclose(axes.collections[0].get_offsets(), [(0.05, 1.0), (0.1, 3.0), (1.0, 4.0)])
    assert list(axes.collections[0].get_alpha()) == pytest.approx([0.2, 0.2, 0.9])
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [(1 / 16, 2.0), (15 / 16, 4.0)])
    assert "steps 10 (pale) to 20 (dark)" in axes.get_title() and "nats" in axes.get_ylabel()


@needs_plot
def test_the_trajectory_lays_tokens_in_lines_coloured_by_their_step():
    steps = [*range(18)][::-1]
    axes = pictures.trajectory(["a"] * 17 + ["$\n    é"], steps).axes[0]
    cells = axes.images[0].get_array().filled(-1)
    assert cells.shape == (2, 16) and list(cells[0]) == steps[:16] and list(cells[1]) == [1, 0] + [-1] * 14
    assert axes.texts[-1].get_text() == "$↵4·\\xe9" and "18 tokens in 18 steps" in axes.get_title()


@needs_plot
def test_the_strip_has_a_bar_for_each_token_asked():
    strips = [
        Strip([True, False, True], [True, False, False], [0.9, 0.0, 0.2]),
        Strip([True] * 3, [False] * 3, [0.1] * 3),
    ]
    one, two = pictures.confidence_strip(["x", " y", "\n"], strips).axes
    bars = {(round(p.get_x() + p.get_width() / 2), colour(p)): p.get_height() for p in one.patches}
    assert bars == {(0, BLUE): 0.9, (1, GIVEN): 1, (2, ORANGE): 0.2}
    assert one.get_ylabel() == "67% predicted\n50% right" and two.get_ylabel() == "100% predicted\n0% right"
    assert [label.get_text() for label in two.get_xticklabels()] == ["x", "·y", "↵"]


@needs_plot
def test_files_and_pixels(tmp_path):
    figure = pictures.trajectory(["a"], [0])
    pictures.save(figure, tmp_path / "deep" / "a.png")
    assert (tmp_path / "deep" / "a.png").read_bytes().startswith(b"\x89PNG")
    seen = pictures.pixels(figure)
    assert seen.dtype == np.uint8 and seen.ndim == 3 and seen.shape[2] == 3 and len(np.unique(seen)) > 2
