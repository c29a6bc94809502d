import pytest

from dlm.evaluation.filling import Filling, fill
from tests.evaluation.knowing import text_lm
from tests.inference.tiny import MASK
from tests.refusals import refused


def test_labels_and_steps():
    assert Filling(rule="margin").label == "margin 1/step"
    assert Filling(rule="threshold", options={"threshold": 0.9}).label == "threshold threshold=0.9"
    assert Filling(rule="margin", name="mine").label == "mine"
    assert [Filling(rule="margin", tokens_per_step=4).steps(n) for n in (1, 4, 5, 55)] == [1, 1, 2, 14]


def test_only_scheduled_rules_take_a_number_of_tokens():
    refused(r"tokens_per_step = 2 with rule 'threshold'.*low_confidence", Filling, rule="threshold", tokens_per_step=2)
    refused("at least one token", Filling, rule="margin", tokens_per_step=0)


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_results_keep_their_order_and_the_steps_their_size(tokens, batch_size):
    """Canvases of unlike length and masks, each filled in ceil(masks / tokens) steps, whatever shares its batch."""
    texts = [[10 * i + j for j in range(12 - i)] for i in range(6)]
    masks = [5, 1, 4, 2, 6, 3]
    canvases = [[MASK] * n + text[n:] for n, text in zip(masks, texts, strict=True)]
    done: list[int] = []
    decoding = Filling(rule="margin", tokens_per_step=tokens)
    found = fill(text_lm(texts), canvases, decoding, batch_size=batch_size, tick=done.append)
    assert [g.tokens for g in found] == [text[:n] for n, text in zip(masks, texts, strict=True)]
    assert [g.nfe for g in found] == [-(-n // tokens) for n in masks]
    assert sum(done) == 6
    assert max(done) <= batch_size
