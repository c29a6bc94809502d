"""The memory plan of a training step, against the bytes that are alive in a real one."""

import pytest
import torch

from dlm.kernels.c import trained
from dlm.models import ModelConfig, Transformer
from dlm.models.streams import block_mask, dense_mask
from dlm.training.config import TrainConfig
from dlm.training.footprint import activation_bytes, plan
from dlm.training.language import matrices_of
from dlm.training.optim import build_optimizer
from dlm.training.run import Run
from tests.inference.live_bytes import LiveBytes
from tests.inference.tiny import tiny_lm
from tests.training.runs import config

SHAPE = {"hidden_size": 64, "num_hidden_layers": 5, "intermediate_size": 160, "head_dim": 16}


def optimiser(network: Transformer, **optim):
    return build_optimizer(network, matrices_of(network), TrainConfig(optim=optim).optim, 1e-3, 0.9)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [{}, {"qk_norm": True, "attention": "causal"}], ids=str)
def test_activations_are_those_that_a_step_keeps(shape, bf16, monkeypatch):
    monkeypatch.setattr(trained, "takes", lambda *tensors: False)  # C's own kernels keep less
    lm = tiny_lm(**SHAPE, **shape)
    network, ids = lm.network.train(), torch.zeros(3, 48, dtype=torch.int64)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return network.hidden(ids)

    forward()
    with LiveBytes() as live, torch.enable_grad():
        result = forward()
        kept = live.now
    planned = activation_bytes(lm.config, 3, 48, bf16)
    print(f"{kept:,} bytes alive, {planned:,} planned")
    assert result.requires_grad and abs(kept - planned) < (0.1 if bf16 else 0.03) * planned
    less = activation_bytes(lm.config, 3, 48, bf16, checkpointing=True)
    network.gradient_checkpointing = True
    with LiveBytes() as live, torch.enable_grad():
        forward().sum().backward()
    gradients = sum(p.numel() * 4 for p in network.parameters())
    print(f"{live.peak:,} bytes at most with checkpoints, {less:,} planned and {gradients:,} of gradients")
    assert 0.6 * less < live.peak - gradients < 1.5 * less


def test_weights_gradients_and_states_are_counted():
    lm = tiny_lm(**SHAPE)
    made = optimiser(
        lm.network, hidden={"algorithm": "muon"}, head={"lr_scale": 0}
    )  # a frozen head has no gradient and no state
    assert {g["algorithm"] for g in made.param_groups} == {"adamw", "muon"}
    found = plan(lm.network, made.param_groups, sequences=2, positions=16, bf16=False, average=True)
    lm.network.hidden(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    made.step()
    states = [x for state in made.state.values() for x in state.values() if isinstance(x, torch.Tensor) and x.dim()]
    assert found.parameters == sum(p.numel() * 4 for p in lm.network.parameters())
    assert found.gradients == sum(p.grad.numel() * 4 for p in lm.network.parameters() if p.grad is not None)
    assert found.optimiser == sum(x.numel() * x.element_size() for x in states)
    halved = plan(lm.network, made.param_groups, sequences=2, positions=16, bf16=False, average=True, shards=2)
    assert (halved.parameters, halved.activations) == (found.parameters // 2, found.activations)


def test_a_shape_of_a_billion_is_planned_without_a_device():
    shape = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16}
    shape |= {"head_dim": 128, "intermediate_size": 6144, "vocab_size": 32_000, "tie_word_embeddings": True}
    with torch.device("meta"):
        network = Transformer(ModelConfig(**shape, mask_token_id=31_999))
    made = optimiser(network)
    whole = plan(network, made.param_groups, sequences=4, positions=2048, bf16=True)
    network.gradient_checkpointing = True
    less = plan(network, made.param_groups, sequences=4, positions=2048, bf16=True)
    print(whole, less, sep="\n")
    count = sum(p.numel() for p in network.parameters())
    assert 0.9e9 < count < 1.1e9 and whole.parameters == whole.gradients == 4 * count
    assert str(whole).startswith("memory: parameters 3.") and less.activations < whole.activations / 5


def test_a_run_says_what_its_steps_need_and_what_two_streams_cost(tmp_path):
    block = {"objective__masking": "block", "objective__block_length": "4"}
    one, two = Run(config(tmp_path)), Run(config(tmp_path, out="two", train__micro_batch_size="2", **block))
    shape = two.network.config
    assert one.memory().activations == activation_bytes(one.network.config, 4, 16, False)
    assert two.memory().activations == activation_bytes(shape, 2, 32, False)  # the noisy text and the clean one
    keys = float(dense_mask(16, 4, torch.device("cpu")).sum() / 16)  # that the two rows of a token see
    attention = 12 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    head = 6 * shape.vocab_size * shape.hidden_size * 0.5
    body = one.flops_a_token - head - attention * 16
    assert two.flops_a_token == pytest.approx(2 * body + head + attention * keys)


@pytest.mark.gpu
@pytest.mark.parametrize("masking", ["random", "block"])
def test_a_step_on_a_gpu_keeps_within_its_plan(masking, tmp_path):
    """Compiled FlexAttention for two streams, fused AdamW, bf16: the most that is allocated, beside what is planned."""
    shape = {"model__hidden_size": "256", "model__intermediate_size": "704", "model__head_dim": "64"}
    shape |= {"train__length": "512", "train__batch_size": "8", "train__precision": "bf16", "train__device": "cuda"}
    shape |= {"objective__masking": masking, "optim__hidden__algorithm": "adamw", "eval__sequences": "0"}
    run = Run(config(tmp_path, **shape))
    run.optimiser_step()  # compiles, and makes the optimiser's state
    made = block_mask.cache_info().misses
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run.optimiser_step()
    planned = run.memory()
    peak = torch.cuda.max_memory_allocated()
    assert block_mask.cache_info().misses == made  # the mask of a shape is made once
    assert before > 0.8 * (planned.parameters + planned.optimiser)
    assert planned.whole * 0.5 < peak < planned.whole * 1.6 + 2**29  # logits, and what kernels work in
    assert all(group["fused"] for part in run.optimizer.parts.values() for group in part.param_groups)
