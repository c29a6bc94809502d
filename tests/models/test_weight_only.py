"""Weights in 8 and 4 bits by torchao: rounded as the formula says, decoded with, refused where they do not fit."""

import importlib.util
import sys

import pytest
import torch

import dlm
from dlm.errors import UserError
from dlm.models import adapters
from dlm.models.fingerprint import weights_digest
from dlm.models.quantise import is_quantised, quantise, require
from dlm.models.weight_only import CONFIGS, parts
from tests.inference.tiny import tiny_lm
from tests.refusals import refused

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
FINEST = {"torchao-fp8": 1 / 8, "torchao-int8": 1 / 127, "torchao-int4": 1 / 7.5}
"""Steps: of a number (3 bits of mantissa), of a row's largest, and of the largest of 64 in a row."""
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs the extra `quant`: torchao"
)


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_rounded_to_the_nearest_and_nothing_else_is(kind, dtype):
    plain, rounded = tiny_lm(**SHAPE).to(dtype), tiny_lm(**SHAPE).to(dtype)
    quantise(rounded.network, kind, CPU)
    assert is_quantised(rounded.network) and not is_quantised(plain.network) and rounded.dtype == dtype
    layer, other = plain.network.layers[0].mlp.down_proj, rounded.network.layers[0].mlp.down_proj
    with torch.no_grad():
        back = other(torch.eye(128, dtype=dtype)).T.float()
    weight = layer.weight.detach().float()
    groups = weight.unflatten(-1, (-1, 64)) if kind == "torchao-int4" else weight.unsqueeze(1)
    step = FINEST[kind] * (groups.abs() if kind == "torchao-fp8" else groups.abs().amax(-1, keepdim=True)).flatten(1)
    if kind != "torchao-fp8":
        step = step.repeat_interleave(groups.shape[-1], 1)
    else:
        step = step + weight.abs().max() * 2**-14  # numbers below the smallest that is normal
    off = (back - weight).abs()
    room = 1.01 if dtype == torch.float32 else 1.3  # scales, or products, in bfloat16
    assert (off <= step / 2 * room + (0 if dtype == torch.float32 else weight.abs() * 2**-7)).all()
    assert off.max() > step.max() / 8
    for name in ("embed.weight", "lm_head.weight", "norm.weight"):
        assert torch.equal(rounded.network.get_parameter(name), plain.network.get_parameter(name))


@needs_torchao
@pytest.mark.parametrize("kind", CONFIGS)
def test_engines_decode_with_them_and_know_them_by_their_digest(kind):
    lm, plain = tiny_lm(**SHAPE), tiny_lm(**SHAPE)
    quantise(lm.network, kind, CPU)
    engine = dlm.Engine(lm, num_pages=20)
    assert engine.batch.stepper.compute.fused is None  # C knows no such weights
    results = engine.generate([[1, 2, 3]] * 2, gen_length=8, block_length=4)
    with torch.no_grad():
        whole = lm.network(torch.tensor([[1, 2, 3, *[63] * 4]]))
        near = plain.network(torch.tensor([[1, 2, 3, *[63] * 4]]))
    assert len(results[0].tokens) == 8 and 0 < (whole - near).abs().max() < near.abs().max()
    assert engine.memory.weights == sum(p.numel() * p.element_size() for x in lm.network.parameters() for p in parts(x))
    assert engine.memory.weights < 0.75 * dlm.Engine(plain, num_pages=20, kernels="torch").memory.weights
    assert weights_digest(lm.network) != weights_digest(plain.network)
    next(parts(lm.network.layers[0].attn.q_proj.weight)).view(torch.uint8)[0, 0] += 1
    refused("weights changed", engine.generate, [1, 2], gen_length=4)


@needs_torchao
def test_shapes_and_kinds_that_do_not_fit_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    refused(
        "experts are stacked, and torchao",
        require,
        "torchao-fp8",
        CPU,
        tiny_lm(model_type="llada2_moe", moe=experts).config,
    )
    lm = tiny_lm(**SHAPE | {"intermediate_size": 80})
    lm.save(tmp_path / "odd")
    odd = lm.config
    where = "cannot do torchao-int4 on cpu for a matrix of 64 rows and 80 columns, which this model has"
    refused(where, require, "torchao-int4", CPU, odd)
    assert require("torchao-int8", CPU, odd) is not None
    monkeypatch.setattr("dlm.models.loading.read_network", None)
    refused(where, dlm.load, tmp_path / "odd", quantize="torchao-int4", device="cpu")


@needs_torchao
def test_load_takes_the_setting_and_a_rounded_model_is_not_saved(tmp_path):
    lm = dlm.load("pico", quantize="torchao-int8", device="cpu")
    assert is_quantised(lm.network)
    assert dlm.generate(lm, "def add(a, b):", gen_length=8)[0].tokens
    refused("is quantised", lm.save, tmp_path / "m")


@needs_torchao
def test_an_adapter_is_merged_before_weights_are_rounded(tmp_path):
    pytest.importorskip("peft", reason="needs the extra `qlora`: peft")
    base = tiny_lm(**SHAPE)
    base.save(tmp_path / "base")
    lm = dlm.load(tmp_path / "base", device="cpu")
    adapters.attach(lm.network, 4, 8.0)
    for name, parameter in lm.network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    lm.save(tmp_path / "adapter")
    both = dlm.load(tmp_path / "base", device="cpu", adapter=tmp_path / "adapter", quantize="torchao-int8")
    merged = dlm.load(tmp_path / "base", device="cpu", adapter=tmp_path / "adapter")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        found, exact, alone = (x.network(ids) for x in (both, merged, base))
    assert (found - exact).abs().max() < 0.25 * (exact - alone).abs().max()
    kept = {"adapter": tmp_path / "adapter", "quantize": "torchao-int8", "merge": False}
    refused("rounds sums of weights and adapters", dlm.load, tmp_path / "base", device="cpu", **kept)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    refused(r"torchao-fp8 needs torchao: pip install 'dlm\[quant\]'", dlm.load, "pico", quantize="torchao-fp8")


@pytest.mark.gpu
@needs_torchao
@pytest.mark.parametrize("kind", CONFIGS)
def test_on_a_gpu(kind):
    """4 bits are two numbers a byte there; decoding records and replays steps as with whole weights."""
    device = torch.device("cuda")
    lm = tiny_lm(**SHAPE | {"hidden_size": 256, "intermediate_size": 1024}).to("bfloat16")
    plain = sum(x.numel() * x.element_size() for x in lm.network.layers.parameters())
    try:
        quantise(lm.network, kind, device)
    except UserError as error:
        pytest.skip(str(error))
    held = sum(p.numel() * p.element_size() for x in lm.network.layers.parameters() for p in parts(x))
    assert held < plain * (0.4 if kind == "torchao-int4" else 0.6)
    engine = dlm.Engine(lm, num_pages=40)
    results = engine.generate([[1, 2, 3]] * 3, gen_length=16, block_length=8)
    assert results[0].tokens == results[1].tokens and engine.batch.stepper.compute.graphs.replays > 0
