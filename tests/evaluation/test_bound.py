import json
import math
from pathlib import Path

import pytest
import torch

from dlm.data.config import DataConfig
from dlm.evaluation.bound import HEADINGS, measure_bound
from dlm.models import LM
from tests.inference.tiny import text_lm
from tests.refusals import refused


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """100 held-out bytes, each document with its end-of-text."""
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("".join(chr(97 + (i * j) % 26) for j in range(25)))
    return DataConfig(source="text", paths=(f"{tmp_path}/*",), heldout_paths=(f"{tmp_path}/*",), cache=False)


def indifferent(lm: LM) -> LM:
    with torch.no_grad():
        for p in lm.network.parameters():
            p.zero_()
    return lm


def test_an_indifferent_model_needs_the_logarithm_of_its_vocabulary(data):
    lm = indifferent(text_lm(mask_in_softmax=False))
    found = measure_bound(lm, data, length=26, draws=3)
    assert (found.sequences, found.tokens, found.bytes) == (4, 104, 100)
    assert found.nats_per_token == pytest.approx(math.log(257), rel=1e-5)
    assert found.nats_error == pytest.approx(0, abs=1e-5)
    assert found.bits_per_byte == pytest.approx(104 / 100 * math.log2(257), rel=1e-5)
    assert found.perplexity == pytest.approx(257, rel=1e-4)
    assert set(HEADINGS) == set(found.row())


def test_few_sequences_and_repeated_masks(data):
    lm = text_lm()
    once, again = (measure_bound(lm, data, length=26, sequences=2, draws=4, seed=5) for _ in range(2))
    assert once.sequences == 2
    assert once.nats_error > 0
    assert (once.nats_per_token, once.nats_error) == (again.nats_per_token, again.nats_error)


def test_nothing_to_measure(data):
    refused("draws = 0", measure_bound, text_lm(), data, length=26, draws=0)


@pytest.mark.parametrize(
    "kind",
    [{}, {"attention": "block_causal", "block_length": 4}, {"attention": "causal", "shifted_logits": True}],
    ids=["bidirectional", "block_causal", "causal"],
)
def test_every_kind_of_network_is_measured_over_the_same_bytes(data, kind):
    lm = indifferent(text_lm(model_type="dlm", mask_in_softmax=False, **kind))
    found = measure_bound(lm, data, length=26, draws=3)
    assert found.bits_per_byte == pytest.approx(104 / 100 * math.log2(257), rel=1e-5)
    assert found.bits_error == pytest.approx(0, abs=1e-5)


def test_a_causal_network_needs_no_mask_but_an_end_of_text(data):
    lm = text_lm(attention="causal", shifted_logits=True, model_type="qwen3")
    bare = lm.network.config.model_copy(update={"mask_token_id": None})
    lm.network.config = bare
    found = measure_bound(lm, data, length=26)
    assert found.nats_error == 0 and found.bits_per_byte is not None
    lm.network.config = bare.model_copy(update={"eos_token_id": None})
    refused("eos_token_id", measure_bound, lm, data, length=26)


def test_one_draw_has_no_error_and_says_so(data):
    found = measure_bound(text_lm(), data, length=26, draws=1)
    assert found.nats_error is None and found.bits_error is None
    assert found.row()["nats"].endswith(" (one draw: no error)") and "nan" not in str(found.row())
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["bits_error"] is None


def test_the_length_is_that_of_what_was_scored(tmp_path):
    (tmp_path / "a.txt").write_text("some words, and others " * 6)
    for kind in ({}, {"attention": "block_causal", "block_length": 4}):
        lm = text_lm(model_type="dlm", **kind)
        data = DataConfig(source="text", paths=str(tmp_path), cache=False)
        found = measure_bound(lm, data, length=500, draws=2)
        assert found.sequences == 1 and found.tokens == found.length < 40
