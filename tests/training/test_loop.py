"""A run end to end: it learns, its folder loads, and what must not matter does not."""

import json
import shutil

import pytest
import torch

import dlm
from dlm.config import to_toml
from dlm.errors import UserError
from dlm.training.loop import train
from dlm.training.profile import flops_a_token
from dlm.training.run import Run
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


def test_the_final_folder_is_read_by_from_pretrained(tmp_path):
    from transformers import AutoModelForMaskedLM

    import dlm.models.hf

    result = train(config(tmp_path, train__steps="2"))
    lm, hf = dlm.load(result.folder, device="cpu"), AutoModelForMaskedLM.from_pretrained(result.folder)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(hf(ids).logits, lm.network(ids))


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
    with pytest.raises(UserError, match="train.tokenizer is not set"):
        Run(
            config(tmp_path).model_copy(update={"train": config(tmp_path).train.model_copy(update={"tokenizer": None})})
        )
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
        assert run.flops_a_token == times * body + 6 * head * asked


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
