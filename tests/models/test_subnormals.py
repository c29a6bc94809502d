"""Subnormal numbers: zeros within, the caller's own arithmetic before and after."""

import numpy as np
import pytest
import torch

import dlm
from dlm.models.subnormals import subnormals_as_zeros
from tests.models import tiny


def product() -> float:
    return (torch.tensor(1e-30) * 1e-10).item()


def test_zeros_until_left_also_by_an_error():
    with subnormals_as_zeros():
        with subnormals_as_zeros():
            assert product() == 0
        assert product() == 0
    assert product() > 0
    with pytest.raises(ValueError, match="lost"), subnormals_as_zeros():
        raise ValueError("lost")
    assert product() > 0


def test_decoding_computes_with_zeros_and_leaves_the_callers_arithmetic_alone():
    lm, products = tiny.model("dlm"), []
    hook = lm.network.layers[0].mlp.register_forward_hook(lambda *_: products.append(product()))
    try:
        dlm.generate(lm, [[1, 2, 3]], gen_length=4, block_length=4, steps=4)
    finally:
        hook.remove()
    assert products and not any(products), "they make a CPU several times slower"
    assert product() > 0 and np.float32(1e-30) * np.float32(1e-10) > 0
