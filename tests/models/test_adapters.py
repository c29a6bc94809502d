import importlib.util
import json
import subprocess
import sys

import pytest
import torch

import dlm
from dlm.errors import UserError
from dlm.models import LM, ModelConfig, Transformer, adapters, loading
from dlm.models.packing import pack
from dlm.models.quantise import is_quantised, quantise, require, shapes
from tests.refusals import refused

from .tiny import near

pytest.importorskip("peft", reason="needs the extra `qlora`: peft")

CPU = torch.device("cpu")
IDS = torch.arange(3, 15)[None]


def quantises(kind: str) -> bool:
    """Whether bitsandbytes is here and runs on a CPU."""
    try:
        return importlib.util.find_spec("bitsandbytes") is not None and bool(require(kind, CPU))
    except UserError:
        return False


needs_bitsandbytes = pytest.mark.skipif(not quantises("nf4"), reason="needs a bitsandbytes that runs on a CPU")


def model(**shape) -> LM:
    size = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4}
    size |= {"intermediate_size": 64}
    config = ModelConfig.model_validate({"vocab_size": 40, "mask_token_id": 39, **size, **shape})
    network = Transformer(config)
    network.initialise(torch.Generator().manual_seed(0))
    return LM(network.eval(), None, "tiny")


def stir(network: Transformer) -> None:
    """Values for the halves that a new adapter has as zeros."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)


@torch.no_grad()
def logits(network: Transformer) -> torch.Tensor:
    return network(IDS)


def adapted(folder) -> LM:
    """A model with an adapter, its base in `folder`/base and the adapter in `folder`/adapter."""
    lm = model()
    lm.save(folder / "base")
    adapters.attach(lm.network, 4, 8.0, base=str(folder / "base"))
    stir(lm.network)
    lm.save(folder / "adapter")
    return lm


def test_a_new_adapter_changes_nothing_and_is_all_that_trains():
    lm = model()
    before = logits(lm.network)
    adapters.attach(lm.network, 4, 8.0)
    near(logits(lm.network), before)
    trained = [name for name, p in lm.network.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7 and all("lora_" in name for name in trained)
    assert not [name for name, _ in lm.network.matrices() if "lora_" in name]


@pytest.mark.parametrize("packed", [False, True])
def test_an_adapter_adds_alpha_over_r_times_b_a(packed):
    lm, plain = model(), model()
    if packed:  # the packed product of q, k and v must not go round the adapter of v
        pack(lm.network)
    adapters.attach(lm.network, 4, 8.0, targets=("v_proj", "down_proj"))
    stir(lm.network)
    with torch.no_grad():
        for ours, theirs in zip(lm.network.layers, plain.network.layers, strict=True):
            for adapted, linear in ((ours.attn.v_proj, theirs.attn.v_proj), (ours.mlp.down_proj, theirs.mlp.down_proj)):
                a, b = (getattr(adapted, half)["default"].weight.double() for half in ("lora_A", "lora_B"))
                linear.weight.copy_(linear.weight.double() + 8 / 4 * b @ a)
    torch.testing.assert_close(logits(lm.network), logits(plain.network), rtol=1e-5, atol=1e-5)
    if packed:
        pack(lm.network)
    torch.testing.assert_close(logits(lm.network), logits(plain.network), rtol=1e-5, atol=1e-5)


def test_an_adapter_is_saved_alone_and_brings_its_base_along(tmp_path):
    lm = adapted(tmp_path)
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))
    apart = dlm.load(tmp_path / "adapter", merge=False)
    merged = dlm.load(tmp_path / "base", adapter=tmp_path / "adapter")
    near(logits(apart.network), logits(lm.network))
    torch.testing.assert_close(logits(merged.network), logits(lm.network), rtol=1e-5, atol=1e-5)
    assert adapters.is_adapted(apart.network) and not adapters.is_adapted(merged.network)
    merged.save(tmp_path / "whole")
    near(logits(dlm.load(tmp_path / "whole").network), logits(merged.network))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers so
def test_peft_itself_reads_the_folder(tmp_path):
    from peft import PeftModel

    from dlm.models.hf import wrap

    lm = adapted(tmp_path)
    theirs = PeftModel.from_pretrained(wrap(dlm.load(tmp_path / "base")), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, logits(lm.network))


def test_what_does_not_fit_says_so(tmp_path):
    lm = model()
    lm.save(tmp_path / "base")
    with pytest.raises(UserError, match=r"adapter\.targets: .*this network's linear layers are down_proj, gate_proj"):
        adapters.attach(model().network, 4, 8.0, targets=("query",))
    refused(r"has no adapter_config\.json", dlm.load, tmp_path / "base", adapter=tmp_path / "base")
    adapters.attach(lm.network, 4, 8.0)
    lm.save(tmp_path / "adapter")
    refused("adapter of an unnamed model", dlm.load, tmp_path / "adapter")
    model(hidden_size=32).save(tmp_path / "narrow")
    refused("does not fit", dlm.load, tmp_path / "narrow", adapter=tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**settings, "peft_type": "IA3"}))
    refused("is of type IA3; only LORA", dlm.load, tmp_path / "base", adapter=tmp_path / "adapter")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(r"adapters need peft: pip install 'dlm\[qlora\]'", adapters.attach, model().network, 4, 8.0)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    refused(r"nf4 needs bitsandbytes: pip install 'dlm\[qlora\]'", dlm.load, "pico", quantize="nf4")


@needs_bitsandbytes
def test_a_bitsandbytes_that_cannot_run_here_is_told(monkeypatch):
    import bitsandbytes

    def fail(*_, **__):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "forward", fail)
    refused(r"cannot do nf4 on cpu \(no kernel\); upgrade it, use a CUDA device", require, "nf4", CPU)


@pytest.fixture(params=[False, True], ids=["plain CPU", "AVX512-BF16"])
def cpu_kind(request, monkeypatch) -> bool:
    """bitsandbytes as on a CPU without and with a kernel of its own for bfloat16."""
    import bitsandbytes

    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: request.param)
    return request.param


@needs_bitsandbytes
def test_every_cpu_quantises_every_shape_and_computes_in_the_dtype_of_the_weights(cpu_kind):
    shape = {"hidden_size": 48, "head_dim": 12, "intermediate_size": 40}  # rows that are no multiple of 32
    small, alone = model(**shape), model(**shape)
    quantise(small.network, "nf4", CPU)
    before = logits(small.network.train())
    after = logits(small.network.eval())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)  # bfloat16 is off by 1e-2
    assert (after - logits(alone.network)).abs().max() > 0


@needs_bitsandbytes
def test_a_validation_changes_no_gradient_of_the_training_after_it(cpu_kind):
    def gradients(validated: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)  # of the adapter's first half
        lm = model()
        quantise(lm.network, "nf4", CPU)
        adapters.attach(lm.network, 4, 8.0)
        stir(lm.network)
        if validated:
            logits(lm.network.eval())
        lm.network.train()(IDS).logsumexp(-1).sum().backward()
        return [p.grad for p in lm.network.parameters() if p.grad is not None]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-5, atol=1e-6)


@needs_bitsandbytes
def test_the_shapes_of_a_network_are_tried_before_its_weights_are_read(tmp_path, monkeypatch):
    import bitsandbytes

    def fail(self, x):
        assert self.out_features % 32 == 0, "N must be divisible by block_n"
        return x

    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "forward", fail)
    fits, odd = model().config, model(intermediate_size=72).config
    assert shapes(odd) == [(64, 64), (72, 64), (64, 72)]
    assert require("nf4", CPU, fits) is bitsandbytes
    why = r"\(N must be divisible by block_n\); upgrade"
    message = f"for a matrix of 72 rows and 64 columns, which this model has {why}"
    refused(message, require, "nf4", CPU, odd)
    model(intermediate_size=72).save(tmp_path)
    monkeypatch.setattr(loading, "read_network", None)
    refused(message, dlm.load, tmp_path, quantize="nf4")


@needs_bitsandbytes
@pytest.mark.parametrize("extra", ["bitsandbytes", "peft"])
def test_bitsandbytes_says_nothing_of_kernels_it_lacks(extra):
    code = f"""
import logging
from dlm.models import adapters, quantise
{"quantise.require('nf4', __import__('torch').device('cpu'))" if extra == "bitsandbytes" else "adapters.require()"}
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("no kernel")
logging.getLogger("bitsandbytes.autograd._functions").warning("a cast")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [words for words in ("no kernel", "a cast", "kernels-community") if words in done.stdout + done.stderr]


@needs_bitsandbytes
@pytest.mark.parametrize(("kind", "bits", "close"), [("nf4", 4, 0.2), ("int8", 8, 0.02)])
def test_quantised_weights_are_small_and_near(tmp_path, kind, bits, close):
    lm = model()
    lm.save(tmp_path / "base")
    plain, small = dlm.load(tmp_path / "base"), dlm.load(tmp_path / "base", quantize=kind)
    mlp, full = small.network.layers[0].mlp.up_proj.weight, plain.network.layers[0].mlp.up_proj.weight
    assert mlp.numel() * mlp.element_size() * 8 == full.numel() * bits
    error = (logits(small.network) - logits(plain.network)).norm() / logits(plain.network).norm()
    assert 0 < error < close
    pack(small.network)
    assert is_quantised(small.network) and len(dlm.generate(small, [[1, 2]], gen_length=4)[0].tokens) <= 4
    refused("is quantised, which no family's layout can say", small.save, tmp_path / "packed")


@needs_bitsandbytes
def test_merging_into_quantised_weights_keeps_the_logits():
    lm = model()
    quantise(lm.network, "nf4", CPU)
    adapters.attach(lm.network, 4, 8.0, targets=("q_proj", "down_proj"))
    stir(lm.network)
    apart = logits(lm.network)
    adapters.merge(lm.network)
    assert not is_quantised(lm.network) and not adapters.is_adapted(lm.network)
    torch.testing.assert_close(logits(lm.network), apart, rtol=1e-4, atol=1e-5)


@needs_bitsandbytes
def test_stacked_experts_are_not_quantised():
    moe = {"num_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 8}
    refused("experts are stacked", quantise, model(moe=moe).network, "nf4", CPU)
