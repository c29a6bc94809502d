"""Tokens drawn in C: those of torch's twin, whatever the logits; and the noise is Gumbel's."""

import numpy as np
import pytest
import torch

from dlm.diffusion.choose import Address, choose
from dlm.diffusion.rng import gumbel
from dlm.kernels import reference
from dlm.kernels.c import binding, native
from tests.kernels.test_multiplies import build  # noqa: F401 (a fixture: every width of vectors)

pytestmark = pytest.mark.skipif(binding.library()[0] is None, reason=binding.library()[1])


def addresses(n: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 2**40, (n,), generator=draw) for name in ("seed", "sample", "step", "position")}


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("vocabulary", [1, 5, 64, 130, 1024, 5003])
def test_the_tokens_are_those_of_the_twin(build, vocabulary, temperature):  # noqa: F811
    for seed, spread in enumerate((0.0, 1.0, 6.0, 40.0)):
        logits, where = torch.randn(40, vocabulary) * spread, addresses(40, seed)
        mask_id = None if vocabulary == 1 else (0, vocabulary - 1, vocabulary // 2, None)[seed]
        logits[3, 0] = float("-inf")
        given = {"mask_id": mask_id, "keep_mask": bool(seed % 2), "temperature": temperature, **where}
        found, twin = native.confidence(logits, **given), reference.confidence(logits.clone(), **given)
        assert torch.equal(found.finite, twin.finite)
        there = twin.finite
        for name in ("token", "first_token"):
            assert torch.equal(getattr(found, name)[there], getattr(twin, name)[there]), name
        for name in ("p", "first", "second", "entropy"):
            close = {"rtol": 2e-5, "atol": 2e-6}
            torch.testing.assert_close(getattr(found, name)[there], getattr(twin, name)[there], **close, msg=name)


@pytest.mark.parametrize("seed", range(6))
def test_where_only_rounding_decides_the_twin_does(build, seed):  # noqa: F811
    """Logits that cancel the noise: every token is as good as any other."""
    where = addresses(30, seed)
    noise = gumbel(**where, vocab_size=300)
    logits = -noise * 0.7
    given = {"mask_id": 7, "temperature": 0.7, **where}
    found, twin = native.confidence(logits, **given), reference.confidence(logits.clone(), **given)
    assert torch.equal(found.token, twin.token) and len(found.token.unique()) > 10


def test_the_twin_decides_only_where_sums_all_but_tie(monkeypatch):
    monkeypatch.setattr(reference, "confidence", None)
    native.confidence(torch.randn(200, 1000), mask_id=3, temperature=1.0, **addresses(200, 1))


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_the_engine_s_own_choice_is_the_same(temperature):
    logits, where = torch.randn(100, 2048) * 3, addresses(100, 5)
    found = native.confidence(logits, mask_id=9, temperature=temperature, **where)
    other = choose(logits.clone(), mask_id=9, temperature=temperature, address=Address(**where))
    assert torch.equal(found.token, other.token)
    torch.testing.assert_close(found.p, other.confidence, rtol=1e-5, atol=1e-7)


def test_frequencies_are_the_softmax():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])
    where = addresses(1, 0) | {"position": torch.arange(40_000)}
    where = {name: x.expand(40_000) for name, x in where.items()}
    found = native.confidence(logits.expand(40_000, 5).contiguous(), mask_id=None, temperature=1.3, **where)
    share = np.bincount(found.token.numpy(), minlength=5) / 40_000
    np.testing.assert_allclose(share, (logits / 1.3).softmax(0), atol=0.01)


def test_a_row_draws_the_same_alone():
    logits, where = torch.randn(50, 700), addresses(50, 2)
    whole = native.confidence(logits, mask_id=None, temperature=0.9, **where)
    for i in (0, 17, 49):
        alone = native.confidence(
            logits[i : i + 1], mask_id=None, temperature=0.9, **{k: x[i : i + 1] for k, x in where.items()}
        )
        assert torch.equal(alone.token[0], whole.token[i]) and torch.equal(alone.p[0], whole.p[i])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_rows_are_told(value):
    logits, where = torch.randn(8, 100), addresses(8, 3)
    logits[2, 50] = value
    found = native.confidence(logits, mask_id=1, temperature=1.0, **where)
    assert found.finite.tolist() == [i != 2 for i in range(8)]
