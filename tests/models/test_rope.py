"""Rotary frequencies against transformers' own."""

import pytest
import torch

from dlm import UserError
from dlm.models.rope import rope_frequencies, rope_table
from tests.refusals import refused

from . import tiny

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3,
    YARN,
    YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    YARN | {"truncate": False},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_scalings(scaling):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny.config("llama", head_dim=32, max_position_embeddings=256, rope_scaling=scaling, rope_theta=5e4)
    theirs = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={**scaling, "rope_theta": 5e4},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    ours, gain = rope_frequencies(config)
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=0)
    assert gain == pytest.approx(factor)


def test_tables_are_computed_in_fp32_whatever_the_default():
    freq, gain = rope_frequencies(tiny.config("dlm", head_dim=8, rope_theta=100.0))
    cos, sin = rope_table(freq, gain, torch.tensor([[0, 3]]), torch.float32)
    angles = 3 * torch.tensor([1.0, 100**-0.25, 100**-0.5, 100**-0.75] * 2)
    torch.testing.assert_close(cos[0, 1, 0], angles.cos())
    torch.testing.assert_close(sin[0, 1, 0], angles.sin())
    with torch.device("meta"):
        assert rope_frequencies(tiny.config("dlm", rope_scaling=YARN))[0].device.type == "cpu"


def test_scalings_that_cannot_be_used_are_named():
    with pytest.raises(UserError, match="'dynamic' is not supported; known: default, linear, llama3, yarn"):
        rope_frequencies(tiny.config("dlm", rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    refused("lacks 'factor'", rope_frequencies, tiny.config("dlm", rope_scaling={"rope_type": "linear"}))
