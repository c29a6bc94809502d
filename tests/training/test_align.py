"""The alignment term against its formula in numpy, and what must not matter to it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import dlm
from dlm.diffusion.rng import Purpose, uniform
from dlm.errors import UserError
from dlm.models import LM, convert, load
from dlm.training.align import Align, build_align
from dlm.training.batch import Batch
from dlm.training.loop import go, train
from dlm.training.objective import Objective
from dlm.training.run import Run
from dlm.training.sections import AlignConfig, ObjectiveConfig
from tests.models import oracle, tiny
from tests.refusals import refused
from tests.training.runs import aligned, config, rows

LENGTH, MASK = 6, 40
Weights = dict[str, np.ndarray]


def outputs(hub: dict, weights: Weights, ids: list[int], causal: bool) -> list[np.ndarray]:
    """Each layer's output (l, d), in float64; a block of one token is causal sight."""
    names, x = oracle.QWEN, np.stack([weights["model.embed_tokens.weight"][i] for i in ids])
    found = []
    for number in range(hub["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        seen = oracle.rms(x, layer["input_layernorm.weight"], hub)
        x = x + oracle.attention(hub, names, layer, seen, 1 if causal else None)
        x = x + oracle.feed_forward(hub, names, layer, oracle.rms(x, layer["post_attention_layernorm.weight"], hub))
        found.append(x)
    return found


def stated(hub: dict, weights: Weights, teacher: Weights, views: list, shifted: bool, layers: list[int]) -> float:
    """1 - cos over the layers, a sequence's places, the views and the sequences, each averaged."""
    samples = len(views[0].targets)
    total = 0.0
    for view in views:
        for noisy, clean, asked in zip(view.input_ids, view.targets, view.predicted, strict=True):
            student = outputs(hub, weights, noisy.tolist(), causal=False)
            target = outputs(hub, teacher, clean.tolist(), causal=True)
            places = [i - shifted for i in asked.nonzero().flatten().tolist() if i >= shifted]
            for layer in layers:
                for i in places:
                    a, b = student[layer][i], target[layer][i]
                    share = len(views) * samples * len(layers) * len(places)
                    total += (1 - a @ b / np.sqrt((a @ a) * (b @ b))) / share
    return total


def pair(tmp_path: Path, case: str = "qwen3") -> tuple[LM, dict, Weights]:
    """A student converted from a causal model in `tmp_path`, and that model as numpy has it."""
    lm = tiny.model(case)
    lm.save(tmp_path / "causal")
    hub = json.loads((tmp_path / "causal" / "config.json").read_text())
    weights = {n: w.astype(np.float64) for n, w in load_file(tmp_path / "causal" / "model.safetensors").items()}
    return convert(lm), hub, weights


def objective_of(tmp_path: Path, lm: LM, masking: str = "random", **align: object) -> Objective:
    settings = {"weight": 2.0, "teacher": str(tmp_path / "causal")} | align
    cfg = config(tmp_path).model_copy(update={"align": AlignConfig.model_validate(settings)})
    term = build_align(cfg, lm, torch.device("cpu"))
    options = ObjectiveConfig(masking=masking, truncate_probability=0.0)
    return Objective(lm.network, options, 0, LENGTH, term)


def batch_of(n: int = 3, step: int = 4, **changes: object) -> Batch:
    ids = torch.randint(3, 39, (n, LENGTH), generator=torch.Generator().manual_seed(2))
    every = {"answer": torch.ones_like(ids, dtype=torch.bool), "index": torch.arange(n), "step": step, "samples": n}
    return Batch(**{"input_ids": ids, **every, **changes})


@pytest.mark.parametrize(
    ("case", "masking", "layers"),
    [("qwen3", "random", "all"), ("llama", "complementary", (1,)), ("qwen3-unshifted", "random", (0,))],
)
def test_the_term_and_its_gradient_are_the_formulas(tmp_path, case, masking, layers):
    shifted = not case.endswith("unshifted")
    lm, hub, weights = pair(tmp_path, case.removesuffix("-unshifted"))
    lm.network.config = lm.config.model_copy(update={"shifted_logits": shifted})
    student = {name: w.copy() for name, w in weights.items()}
    objective, batch = objective_of(tmp_path, lm, masking, layers=layers), batch_of()
    views = objective.masking.views(batch)
    numbers = [0, 1] if layers == "all" else list(layers)
    found = objective(batch)["align"]
    expected = stated(hub, student, weights, views, shifted, numbers)
    assert found.item() == pytest.approx(2 * expected, rel=1e-5)
    lm.network.zero_grad()
    found.backward()
    hub_names = {"embed.weight": "model.embed_tokens.weight"}
    hub_names |= {f"layers.0.attn.{n}_proj.weight": f"model.layers.0.self_attn.{n}_proj.weight" for n in "qo"}
    hub_names |= {"layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj.weight"}
    for ours, theirs in hub_names.items():
        gradient = dict(lm.network.named_parameters())[ours].grad
        place = np.unravel_index(int(gradient.abs().argmax()), gradient.shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = {**student, theirs: student[theirs].copy()}
            moved[theirs][place] += step
            ends.append(2 * stated(hub, moved, weights, views, shifted, numbers))
        assert gradient[place].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=2e-3), ours
    assert all(p.grad is None for p in objective.align.teacher.hidden.__self__.parameters())


def test_layers_and_tokens_of_a_step_are_the_ones_with_the_smallest_numbers(tmp_path):
    lm, hub, weights = pair(tmp_path)
    objective = objective_of(tmp_path, lm, num_sample_layers=1, sub_sample_ratio=0.5)
    seen = set()
    for step in range(8):
        batch = batch_of(step=step)
        (view,) = objective.masking.views(batch)
        drawn = uniform(Purpose.LAYER, seed=0, step=step, position=torch.arange(2))
        layer = int(drawn.argmin())
        seen.add(layer)
        assert objective.align.layers(step) == [layer]
        kept = torch.zeros_like(view.predicted)
        for row in range(3):
            places = view.predicted[row, 1:].nonzero().flatten() + 1
            numbers = uniform(Purpose.ALIGN, seed=0, sample=row, step=step, position=places)
            kept[row, places[numbers.argsort()[: max(1, round(len(places) / 2))]]] = True
        view = type(view)(view.input_ids, view.targets, kept, view.weight)
        expected = stated(hub, weights, weights, [view], True, [layer])
        assert objective(batch)["align"].item() == pytest.approx(2 * expected, rel=1e-5)
        assert list(objective.align.cosines) == [layer]
    assert seen == {0, 1}


def test_the_term_its_gradient_and_the_cosines_do_not_depend_on_how_a_batch_is_split(tmp_path):
    lm, _, _ = pair(tmp_path)
    objective = objective_of(tmp_path, lm, num_sample_layers=1, sub_sample_ratio=0.7)
    whole = batch_of(8)
    together = objective(whole)["align"]
    together.backward()
    gradients, cosines = [p.grad.clone() for p in lm.network.layers.parameters()], objective.align.cosines
    lm.network.zero_grad()
    objective.align.step = -1
    shares = [objective(whole.rows(i, i + 1))["align"] for i in range(8)]
    sum(shares).backward()
    assert sum(share.item() for share in shares) == pytest.approx(together.item(), rel=1e-5)
    for expected, p in zip(gradients, lm.network.layers.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(objective.align.cosines, cosines)
    (cosine,) = cosines.values()
    counted = objective.align.counted.item()  # the share of sequences that had a masked token
    assert together.item() == pytest.approx(2 * counted * (1 - cosine.item()), rel=1e-5)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    lm, _, _ = pair(tmp_path)
    objective = objective_of(tmp_path, lm)
    objective(batch_of())["align"].backward()
    gradients = [p.grad.clone() for p in lm.network.layers.parameters()]
    lm.network.zero_grad()
    lm.network.train().gradient_checkpointing = True
    objective(batch_of())["align"].backward()
    for parameter, gradient in zip(lm.network.layers.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("decay", "weights"), [("constant", [4, 4, 4]), ("linear", [4, 2.5, 1]), ("cosine", [4, 2.5, 1])]
)
def test_the_weight_follows_its_schedule(decay, weights):
    final = {} if decay == "constant" else {"final_weight": 1}
    term = Align(AlignConfig(weight=4, decay=decay, **final), None, 0)
    assert [term.weight(progress) for progress in (0, 0.5, 1)] == pytest.approx(weights)
    if decay == "cosine":
        assert term.weight(0.25) == pytest.approx(1 + 3 * (1 + math.cos(math.pi / 4)) / 2)


def test_a_run_aligns_and_saves_a_diffusion_model_without_its_teacher(base):
    run = Run(aligned(base, "plain", train__ema="0.9"))
    assert {name for name, _ in run.objective.named_modules() if "align" in name} == set()
    trained = sum(p.numel() for group in run.optimizer.param_groups for p in group["params"])
    assert trained == sum(p.numel() for p in run.network.parameters())
    result = go(run)
    first = rows(result.folder)[0]
    assert first["loss"] == pytest.approx(first["loss/masked"] + first["loss/align"]) and first["loss/align"] > 0
    lm = load(result.folder, device="cpu")
    assert (lm.config.attention, lm.config.shifted_logits) == ("bidirectional", True)
    assert len(dlm.generate(lm, ["def "], gen_length=4)[0].tokens) <= 4


def test_stopped_and_resumed_it_is_the_run_that_never_stopped(base):
    options = {"align__decay": "cosine", "align__num_sample_layers": "1", "align__sub_sample_ratio": "0.5"}
    straight = train(aligned(base, "straight", **options)).losses
    first = Run(aligned(base, "stopped", **options))
    losses = [sum(first.optimiser_step()[0].values()) for _ in range(3)]
    first.save_checkpoint()
    again = train(aligned(base, "stopped", **options))
    assert losses + again.losses == straight


def test_a_run_whose_weight_decays_is_not_extended(base):
    options = {"train__schedule": "constant", "align__decay": "linear"}
    run = Run(aligned(base, "longer", **options))
    run.optimiser_step()
    run.save_checkpoint()
    with pytest.raises(UserError, match="was written with train.steps = 8, but now train.steps = 12"):
        Run(aligned(base, "longer", **options, train__steps="12")).resume()


def test_another_teacher_does_not_take_over_a_run(base, tmp_path):
    lm = load(base / "ar", device="cpu")
    lm.save(tmp_path / "teacher")
    cfg = aligned(base, "taught", align__teacher=str(tmp_path / "teacher"))
    run = Run(cfg)
    run.optimiser_step()
    run.save_checkpoint()
    lm.network.norm.weight.data[0] += 1
    lm.save(tmp_path / "teacher")
    refused("aligned to a teacher with weights", Run(cfg).resume)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"align__layers": "[0, 2]"}, "names layer 2, but there are layers 0 to 1"),
        ({"align__layers": "[0, 0]"}, "a layer is named twice"),
        ({"align__layers": "[-1]"}, "numbers of layers from 0 on"),
        ({"align__num_sample_layers": "3"}, "num_sample_layers = 3, but there are 2"),
        ({"align__layers": "[0]", "align__num_sample_layers": "2"}, "align.layers names 1"),
        ({"objective__masking": "causal"}, "masks nothing that could be aligned"),
        ({"train__init_from": "none"}, "no teacher; set align.teacher or train.init_from"),
        ({"align__anchors": "nowhere"}, "holds no anchors.json: write it with dlm-prepare anchors"),
    ],
)
def test_impossible_alignments_say_so_before_work(base, overrides, message):
    refused(message, lambda: Run(aligned(base, "refused", **overrides)))


def test_unfit_teachers_are_refused(base, tmp_path):
    lm = convert(load(base / "ar", device="cpu"))
    lm.save(tmp_path / "bidirectional")
    with pytest.raises(UserError, match="is bidirectional: a teacher is a causal model"):
        Run(aligned(base, "refused", align__teacher=str(tmp_path / "bidirectional")))
    wide = {"objective__masking": "causal", "model__hidden_size": "24", "train__steps": "1", "eval__sequences": "0"}
    other = train(config(base, "wide", train__warmup_steps="0", **wide))
    refused("states of width 24, the network of 16", Run, aligned(base, "refused", align__teacher=str(other.folder)))
    tiny.model("qwen3").save(tmp_path / "foreign")
    lm.tokenizer.backend.add_tokens(["more"])
    convert(lm, "causal").save(tmp_path / "foreign")
    refused("has another tokenizer", Run, aligned(base, "refused", align__teacher=str(tmp_path / "foreign")))


def test_frozen_modules_stay_as_the_teacher_has_them(base):
    frozen = train(aligned(base, "frozen", optim__freeze='["lm_head", "embed", "mlp"]', train__lr="0.01"))
    before, after = (load(folder, device="cpu").network.state_dict() for folder in (base / "ar", frozen.folder))
    moved = {name.split(".")[-2] for name in after if not torch.equal(before[name], after[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "attn_norm", "mlp_norm", "norm"}


@pytest.mark.filterwarnings("ignore")  # dynamo turns warnings into errors of its own when they are errors
def test_layers_outputs_leave_a_compiled_network_too(tmp_path):
    lm, _, _ = pair(tmp_path)
    objective = objective_of(tmp_path, lm)
    plain = objective(batch_of())["align"]
    compiled = torch.compile(lm.network.hidden, backend="eager", fullgraph=True, dynamic=False)
    objective.hidden = objective.align.teacher.hidden = compiled
    assert objective(batch_of())["align"].item() == pytest.approx(plain.item(), rel=1e-5)
