import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dlm
from dlm.cli import infer
from dlm.cli import train as command
from dlm.config import to_toml
from dlm.data.shards import read_manifest
from dlm.errors import UserError
from dlm.models.converting import convert
from dlm.training import checkpoint
from dlm.training.loop import go, train
from dlm.training.profile import flops_a_token
from dlm.training.run import Run
from dlm.training.start import starting_point
from tests.refusals import refused
from tests.training.runs import config, rows


def test_a_run_learns_validates_and_leaves_a_folder_that_loads(tmp_path):
    result = train(config(tmp_path, train__steps="60", train__lr="0.01", eval__every="30", eval__sequences="8"))
    losses = [r["loss"] for r in rows(result.folder) if "loss" in r]
    assert losses == pytest.approx(result.losses) and sum(losses[-10:]) < 0.8 * sum(losses[:10])
    bounds = [r for r in rows(result.folder) if "bound" in r]
    assert [r["step"] for r in bounds] == [30, 60] and bounds[1]["bound"] < bounds[0]["bound"]
    assert result.bound[0] == bounds[1]["bound"] and result.bits_per_byte[0] == bounds[1]["bits_per_byte"]
    lm = dlm.load(result.folder, device="cpu")
    text = dlm.generate(lm, ["def function_"], gen_length=8, block_length=8, steps=8)[0]
    assert len(text.tokens) <= 8 and text.nfe >= 1


@pytest.mark.parametrize(
    "options", [{"train__micro_batch_size": "1"}, {"train__gradient_checkpointing": "true"}], ids=str
)
def test_accumulation_and_gradient_checkpointing_do_not_change_the_losses(tmp_path, options):
    plain, other = train(config(tmp_path, "a")), train(config(tmp_path, "b", **options))
    assert other.losses == pytest.approx(plain.losses, rel=1e-4)


@pytest.mark.parametrize(("clip", "most"), [("0.01", 0.01), ("0", float("inf"))])
def test_gradients_are_clipped_to_a_norm(tmp_path, clip, most):
    run, seen = Run(config(tmp_path, train__clip=clip)), []
    gradients = lambda *_: seen.append(torch.nn.utils.get_total_norm(p.grad for p in run.network.parameters()).item())  # noqa: E731
    run.optimizer.register_step_pre_hook(gradients)
    _, norm = run.optimiser_step()
    assert norm > 0.01 and seen == [pytest.approx(min(norm, most), rel=1e-3)]


def test_bf16_and_averaged_weights_run(tmp_path):
    result = train(config(tmp_path, train__precision="bf16", train__ema="0.5", train__save_dtype="bfloat16"))
    assert all(loss == loss for loss in result.losses)
    assert dlm.load(result.folder, dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_training_goes_on_from_a_saved_model(tmp_path):
    first = train(config(tmp_path, "first", train__steps="40", train__lr="0.01"))
    second = train(config(tmp_path, "second", train__init_from=str(first.folder), train__steps="2"))
    assert second.losses[0] < first.losses[0]


def test_a_run_may_be_given_as_a_file_or_a_table(tmp_path):
    table = config(tmp_path, train__steps="2").model_dump(mode="json", exclude_none=True)
    (tmp_path / "run.toml").write_text(to_toml(config(tmp_path, "again", train__steps="2")))
    assert dlm.train(table).losses == dlm.train(tmp_path / "run.toml").losses
    refused('unknown key "train.step"; did you mean "train.steps"', dlm.train, {"train": {"step": 3}})


def test_impossible_runs_say_so_before_work(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("needs a C\\+\\+ compiler", Run, config(tmp_path, train__compile="true"))
    refused("smaller than the tokenizer's 283", Run, config(tmp_path, model__vocab_size="100"))


def test_flops_count_the_weights_a_token_meets(tmp_path):
    run = Run(config(tmp_path, model__tie_word_embeddings="true"))
    c, n = run.network.config, sum(p.numel() for p in run.network.parameters())
    head = c.vocab_size * c.hidden_size
    body = 6 * (n - head) + 12 * 16 * 16 * 2
    assert flops_a_token(c, n, 16) == run.flops_a_token == body + 3 * head
    for masking, times, asked in (("complementary", 2, 1), ("block", 2, 0.5), ("causal", 1, 1)):
        more = {"objective__block_length": "4"} if masking == "block" else {}
        run = Run(config(tmp_path, model__tie_word_embeddings="true", objective__masking=masking, **more))
        unseen = 12 * 16 * 2 * (2 * 16 - (16 + 4)) if masking == "block" else 0  # keys that two streams do not see
        assert run.flops_a_token == times * body - unseen + 6 * head * asked


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # dynamo turns warnings into errors of its own when they are errors
@pytest.mark.slow
def test_compiled_parts_train_like_eager_ones_and_leave_the_network_alone(tmp_path):
    eager = Run(config(tmp_path, "eager", train__ema="0.9"))
    compiled = Run(config(tmp_path, "compiled", train__ema="0.9", train__compile="true"))
    losses = [[sum(run.optimiser_step()[0].values()) for _ in range(2)] for run in (eager, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert "hidden" not in vars(compiled.network)


def test_samples_are_shown_while_training_and_one_beyond_the_context_ends_no_run(tmp_path, capsys):
    prompts = json.dumps(["def f", "x = [MASK:2]", "x [MASK:60000]"])
    train(config(tmp_path, train__steps="2", eval__sample_every="2", eval__prompts=prompts, log__progress="true"))
    shown = capsys.readouterr().err
    assert "--- step 2: 'def f'\n" in shown and "--- step 2: 'x = [MASK:2]'\nx = " in shown
    assert "--- step 2: 'x [MASK:60000]': prompt 0 has 6000" in shown


def test_the_first_loss_that_is_not_finite_ends_the_run(tmp_path, capsys):
    cfg = config(tmp_path, train__lr="1e20", checkpoint__every="1", checkpoint__keep_last="9")
    (tmp_path / "my.toml").write_text(to_toml(cfg))
    assert command.main(["--config", str(tmp_path / "my.toml")]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dlm-train: ")]
    step = len(rows(tmp_path / "run")) + 1
    assert f"step {step}: the loss is nan and the gradient norm" in said and "at learning rate 1e+20" in said
    assert "Lower train.lr (now 1e+20)" in said and "train.warmup_steps (now 2)" in said and "another train.out" in said
    left = checkpoint.found(tmp_path / "run" / "checkpoints")
    assert checkpoint.step_of(left[0]) < step and str(left[0]) in said
    for file in left:
        assert all(values.isfinite().all() for values in load_file(file / "model.safetensors").values())
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path):
    run = Run(config(tmp_path))
    step = run.optimiser_step
    run.optimiser_step = lambda: (step()[0], float("inf") if run.step == 3 else 1.0)
    refused(r"step 3: the loss is [\d.]+ and the gradient norm inf.*no checkpoint was written", go, run)


@pytest.mark.parametrize("where", ["weight", "optimiser"])
def test_a_checkpoint_of_lost_weights_is_not_written(tmp_path, where):
    run = Run(config(tmp_path))
    run.optimiser_step()
    run.save_checkpoint()
    run.optimiser_step()
    parameter = run.network.embed.weight
    values = parameter if where == "weight" else run.optimizer.state[parameter]["exp_avg_sq"]
    with torch.no_grad():
        values[3, 2] = torch.inf
    refused(r"step 2: network.embed.weight.* is not finite.*step-00000001", run.save_checkpoint)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_last_step_that_ruins_the_weights_leaves_no_model(tmp_path):
    """The loss of the last step is from before it."""
    with pytest.raises(UserError, match="step 1: .* is not finite, at learning rate 1e\\+38"):
        train(config(tmp_path, train__lr="1e38", train__steps="1", train__warmup_steps="0", eval__sequences="0"))
    assert not (tmp_path / "run" / "model.safetensors").exists()


TEXT = "\n\n".join(f"Chapter {i}.\nIt was the day {i} of {i * 7}, and it rained." for i in range(150))
SMALL = [
    *("--model.hidden_size", "16", "--model.num_hidden_layers", "1", "--model.num_attention_heads", "1"),
    *("--model.num_key_value_heads", "1", "--model.head_dim", "16", "--model.intermediate_size", "16"),
    *("--train.batch_size", "2", "--train.length", "64", "--eval.sequences", "2", "--train.device", "cpu"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An own folder with my.txt in it, and caches of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("named", [True, False], ids=["--train.tokenizer pico", "no tokenizer"])
def test_from_one_text_file_to_text(folder, capsys, named):
    words = ["--data.source", "text", "--data.paths", "my.txt", "--train.steps", "20", "--train.out", "out"]
    words += ["--train.tokenizer", "pico"] if named else []
    assert command.main([*words, *SMALL, "--eval.draws", "2" if named else "1"]) == 0
    out, err = capsys.readouterr()
    assert "out: the model after 20 steps" in out and "try it: dlm-infer --model out --prompt 'some text'" in err
    assert ("train.tokenizer is not set: taking that of pico" in err) != named
    assert ("(one draw: no error) nats/token" in err) != named
    (bound,) = (row for row in rows(Path("out")) if "bound" in row)
    assert (bound["bound_error"] is None) != named
    assert "NaN" not in Path("out", "metrics.jsonl").read_text()
    assert infer.main(["--model", "out", "--prompt", "It was", "--sampler.gen_length", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nfe"] >= 1


def test_prepare_takes_a_bundled_tokenizer(folder, capsys):
    words = ["--data.source", "text", "--data.paths", "my.txt", "--prepare", "shards", "--train.length", "64"]
    assert command.main([*words, "--train.tokenizer", "pico"]) == 0
    manifest = read_manifest(Path("shards"))
    assert manifest["tokenizer"] == dlm.load("pico").require_tokenizer().fingerprint
    assert set(manifest["splits"]) == {"train", "heldout"} and manifest["splits"]["heldout"][0]["samples"] >= 1


def test_a_tokenizer_is_named_as_a_model_is(folder):
    base = config(folder)
    for name, size in (("pico", 4096), ("tokenizer", 283), ("tokenizer/tokenizer.json", 283)):
        name = name if name == "pico" else str(folder / name)
        named = base.model_copy(update={"train": base.train.model_copy(update={"tokenizer": name})})
        assert starting_point(named).require_tokenizer().vocab_size == size


def test_a_block_causal_start_keeps_its_attention_unless_the_objective_says_otherwise(folder):
    convert(starting_point(config(folder)), "block_causal", 4).save(folder / "block")
    started = {"train__init_from": str(folder / "block")}
    kinds = [
        starting_point(config(folder, **started, **more)).config.attention
        for more in ({}, {"objective__attention": "bidirectional"}, {"objective__masking": "causal"})
    ]
    assert kinds == ["block_causal", "bidirectional", "causal"]
    said = "attention = 'bidirectional' is only read with masking = random or complementary or spans or trajectory, not causal"
    refused(said, config, folder, objective__masking="causal", objective__attention="bidirectional")


def test_a_start_without_a_tokenizer_says_so(folder, capsys):
    lm = starting_point(config(folder))
    lm.save(folder / "bare")
    (folder / "bare" / "tokenizer.json").unlink()
    words = ["--data.source", "text", "--data.paths", "my.txt", "--train.out", "out", *SMALL[-8:]]
    assert command.main([*words, "--train.tokenizer", "./bare"]) == 2
    assert "bare holds no tokenizer.json: train one with dlm-tokenizer" in capsys.readouterr().err
    run = Run(config(folder, train__init_from=str(folder / "bare")))  # with one of its own it goes
    assert run.model.lm.require_tokenizer().vocab_size == 283
