"""Documents packed into one row, apart: each token costs what it costs in its document alone."""

import pytest
import torch
import torch.nn.functional as F

from dlm.models.attention import AttentionSpec
from dlm.training.batch import Batch
from dlm.training.masking import masking_of
from dlm.training.masking.view import View
from dlm.training.sections import ObjectiveConfig
from tests.inference.tiny import tiny_lm
from tests.refusals import refused

EOS = 0
DOCUMENTS = [[5, 9, 3, EOS], [7, 7, 2, 8, 4, EOS], [6, EOS], [1, 2, 3, 4]]
ROW = [token for document in DOCUMENTS for token in document]


def network(**fields):
    return tiny_lm(eos_token_id=EOS, **fields).network


def views(masking: str, model, documents: str) -> list[View]:
    row = torch.tensor([ROW])
    config = ObjectiveConfig(masking=masking, documents=documents, truncate_probability=0.0)
    batch = Batch(row, torch.ones_like(row, dtype=torch.bool), torch.tensor([3]), step=1, samples=1)
    return masking_of(config, model.config, seed=0).views(batch)


def nats(model, canvas, targets, attention, positions, shifted) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.hidden(canvas, positions, attention=attention)
        states = (attention or model.attention).states(hidden, shifted)
        logits = model.suppress(model.head(states), always=True)
    return F.cross_entropy(logits[0], targets[0], reduction="none")


@pytest.mark.parametrize("masking", ["random", "complementary", "causal"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"shifted_logits": True}, {"attention": "block_causal", "block_length": 2}, {"attention": "causal", "shifted_logits": True}],
    ids=["bidirectional", "shifted", "block_causal", "causal"],
)  # fmt: skip
def test_a_document_costs_packed_what_it_costs_alone(masking, fields):
    model = network(**fields)
    for view in views(masking, model, "apart"):
        shifted = model.config.shifted_logits if view.shifted is None else view.shifted
        packed = nats(model, view.input_ids, view.targets, view.attention, view.positions, shifted)
        spec = AttentionSpec("causal") if masking == "causal" else AttentionSpec.of(model.config)
        opens, start = masking == "causal" or shifted, 0
        for i, document in enumerate(DOCUMENTS):
            rows = slice(start, start + len(document))
            canvas, targets = view.input_ids[:, rows], view.targets[:, rows]
            before = int(
                opens and i > 0 and masking != "causal"
            )  # the end-of-text that a shifted network predicts from
            if before:  # as it is shown: masked or not
                canvas = view.input_ids[:, start - 1 : rows.stop]
                targets = view.targets[:, start - 1 : rows.stop]
            if opens and masking != "causal" and i + 1 < len(DOCUMENTS):
                canvas, targets = canvas[:, :-1], targets[:, :-1]  # its end-of-text is the next one's first
                rows = slice(start, start + len(document) - 1)
            alone = nats(model, canvas, targets, spec, None, shifted)[before:]
            torch.testing.assert_close(packed[rows], alone, atol=1e-5, rtol=1e-5)
            start += len(document)


def test_joined_documents_do_see_each_other():
    model = network()
    (apart,), (joined,) = views("random", model, "apart"), views("random", model, "joined")
    assert torch.equal(apart.input_ids, joined.input_ids) and torch.equal(apart.weight, joined.weight)
    costs = [nats(model, v.input_ids, v.targets, v.attention, v.positions, False) for v in (apart, joined)]
    assert (costs[0] - costs[1]).abs().min() > 1e-6


def test_documents_need_an_end_of_text():
    refused("set model.eos_token_id", views, "random", tiny_lm().network, "apart")
