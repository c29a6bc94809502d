"""qwen2, qwen3 and llama against transformers, in both directions."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlm.models import load

from . import tiny

SHAPE: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 40, "initializer_range": 0.3, "rms_norm_eps": 1e-5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
CASES = [
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
]


def build(family: str, settings: dict) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    # No kernels from the hub, and the same attention everywhere.
    config = AutoConfig.for_model(family, **SHAPE, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
def test_there_and_back(family, settings, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs, ids = build(family, settings), tiny.tokens()
    theirs.save_pretrained(tmp_path / "theirs")
    lm = load(tmp_path / "theirs", dtype="float32", device="cpu")
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (lm.network(ids) - expected).abs().max() < 1e-5 * expected.abs().max()
        lm.save(tmp_path / "ours")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="sdpa")
        tiny.near(again(ids).logits, expected)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    hub = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (hub["model_type"], hub["architectures"]) == (family, [type(theirs).__name__])
