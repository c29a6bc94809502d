"""Masking and the loss against the enumeration of all masks, and against what must not matter."""

import pytest
import torch
import torch.nn.functional as F

from dlm.diffusion.noise import EPSILON, mask_probability, mask_tokens
from dlm.diffusion.rng import Purpose, uniform
from dlm.models.attention import AttentionSpec
from dlm.training.batch import Batch
from dlm.training.masking import masking_of
from dlm.training.masking.view import View
from dlm.training.objective import Objective
from dlm.training.sections import ObjectiveConfig
from tests.diffusion.enumeration import LENGTH, MASK, exact_loss, masked_nats, tiny_network
from tests.inference.tiny import tiny_lm
from tests.refusals import refused

IDS = [2, 0, 3, 1]


def batch(n: int, step: int = 0, **changes) -> Batch:
    ids = torch.tensor([IDS]).repeat(n, 1)
    return Batch(**{"input_ids": ids, "answer": torch.ones_like(ids, dtype=torch.bool), "index": torch.arange(n), "step": step,
                    "samples": n} | changes)  # fmt: skip


def loss_of(objective: Objective, rows: Batch) -> torch.Tensor:
    return sum(objective(rows).values())


@pytest.mark.parametrize("options", [{}, {"antithetic": False}, {"masking": "complementary"}], ids=str)
def test_the_mean_loss_is_the_enumerated_one(options):
    network = tiny_network()
    objective = Objective(network, ObjectiveConfig(truncate_probability=0.0, **options), seed=0, length=LENGTH)
    with torch.no_grad():
        losses = torch.stack([loss_of(objective, batch(400, step)) for step in range(40)])
    exact = exact_loss(masked_nats(network, IDS), LENGTH)
    assert abs(losses.mean().item() - exact) < 4 * losses.std().item() / 40**0.5
    assert losses.std().item() / 40**0.5 / exact < 0.02


def test_exact_counts_have_the_same_mean_up_to_rounding_and_uniform_weights_count_every_token_twice():
    network = tiny_network()
    exact = exact_loss(masked_nats(network, IDS), LENGTH)
    objective = Objective(network, ObjectiveConfig(truncate_probability=0.0, exact_count=True), seed=0, length=LENGTH)
    with torch.no_grad():
        mean = torch.stack([loss_of(objective, batch(400, step)) for step in range(20)]).mean().item()
    assert mean == pytest.approx(exact, rel=0.05)
    uniform = Objective(network, ObjectiveConfig(truncate_probability=0.0, weighting="uniform"), seed=0, length=LENGTH)
    masks = mask_tokens(torch.tensor([IDS]), torch.arange(1), MASK, seed=0, step=4,
                        probability=mask_probability(torch.arange(1), seed=0, step=4, antithetic=True, batch=1)).masked  # fmt: skip
    nats = masked_nats(network, IDS)[tuple(masks[0].tolist())]
    assert loss_of(uniform, batch(1, step=4)).item() == pytest.approx(2 * nats / LENGTH, rel=1e-5)


def test_spans_mask_whole_runs_of_a_share_of_the_sequences():
    rows, length = 600, 64
    ids = torch.zeros(rows, length, dtype=torch.long)
    answer = torch.ones_like(ids, dtype=torch.bool)
    answer[:, :8] = False
    asked = batch(rows, step=3, input_ids=ids, answer=answer)
    config = ObjectiveConfig(masking="spans", span_share=0.4, span_length=4.0, span_level=0.5, truncate_probability=0.0)
    network = tiny_network()
    [view] = masking_of(config, network.config, 5).views(asked)
    [single] = masking_of(ObjectiveConfig(truncate_probability=0.0), network.config, 5).views(asked)

    def number(row: int, position: int, token: int) -> float:
        return float(uniform(Purpose.SPAN, seed=5, sample=row, step=3, position=position, token=token))

    spanned = 0
    for row in range(rows):
        if number(row, 0, 0) >= 0.4:
            assert torch.equal(view.predicted[row], single.predicted[row])
            assert torch.equal(view.weight[row], single.weight[row])
            continue
        spanned, begin, expected = spanned + 1, 0, []
        for at in range(length):
            begin = at if number(row, at, 1) < 1 / 4 ** number(row, 2, 0) else begin
            expected.append(at >= 8 and number(row, begin, 2) < 0.5 * number(row, 1, 0))
        assert view.predicted[row].tolist() == expected
        assert torch.allclose(view.weight[row, view.predicted[row]], torch.tensor(2 / 0.5 / (56 * rows)))
    assert abs(spanned / rows - 0.4) < 0.08
    assert torch.equal(view.input_ids == MASK, view.predicted)
    mine = view.predicted[:, 9:] & view.predicted[:, 8:-1]
    assert mine.sum() > 0.5 * view.predicted[:, 9:].sum()  # neighbours go together
    assert abs((view.weight * view.predicted).sum() - 1) < 0.1  # each token counts one on average


def test_the_ends_of_a_run_may_count_more_than_its_middle():
    rows, length = 200, 32
    ids = torch.zeros(rows, length, dtype=torch.long)
    asked = batch(rows, step=3, input_ids=ids, answer=torch.ones_like(ids, dtype=torch.bool))
    settings = {"masking": "spans", "span_share": 1.0, "span_level": 0.8, "truncate_probability": 0.0}
    config = tiny_network().config
    [even] = masking_of(ObjectiveConfig(**settings), config, 5).views(asked)
    [edged] = masking_of(ObjectiveConfig(**settings, span_edges=1.5), config, 5).views(asked)
    assert torch.equal(even.predicted, edged.predicted)
    for row in range(rows):
        shown = [at for at in range(length) if not even.predicted[row, at]]
        asks = [at for at in range(length) if even.predicted[row, at]]
        raw = [min([abs(at - other) for other in shown], default=1) ** -1.5 for at in asks]
        total = float(even.weight[row, asks].sum())
        expected = torch.tensor([total * one / sum(raw) for one in raw])
        assert torch.allclose(edged.weight[row, asks], expected)


def test_a_prompt_is_never_masked_and_the_answer_is_averaged_over_its_own_length():
    network = tiny_network()
    answer = torch.tensor([[False, False, True, True]]).repeat(8, 1)
    noised = mask_tokens(torch.tensor([IDS]).repeat(8, 1), torch.arange(8), MASK, seed=0, step=0, maskable=answer)
    assert not noised.masked[:, :2].any() and noised.masked[:, 2:].any()
    objective = Objective(network, ObjectiveConfig(truncate_probability=1.0), seed=0, length=LENGTH)
    batches = [batch(100, step, answer=answer[:1].repeat(100, 1)) for step in range(30)]
    assert {view.targets.shape[1] for rows in batches for view in objective.masking.views(rows)} == {LENGTH}  # uncut
    losses = [loss_of(objective, rows).item() for rows in batches]
    table = masked_nats(network, IDS)
    t = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    p = (1 - EPSILON) * t + EPSILON
    single, both = (1 - p).mean().item(), p.mean().item()
    exact = (
        single * (table[False, False, True, False] + table[False, False, False, True])
        + both * table[False, False, True, True]
    ) / 2
    losses = torch.tensor(losses)
    assert abs(losses.mean().item() - exact) < 4 * losses.std().item() / 30**0.5


def test_antithetic_levels_cover_the_range_evenly_and_stay_uniform():
    p = mask_probability(torch.arange(16, 32), seed=1, step=7, antithetic=True, batch=16).flatten()
    assert torch.allclose(p.sort().values.diff(), torch.full((15,), (1 - EPSILON) / 16), atol=1e-6)
    first = torch.stack(
        [mask_probability(torch.tensor([5]), seed=1, step=s, antithetic=True, batch=16) for s in range(2000)]
    )
    assert abs(first.mean().item() - 0.5) < 0.03 and abs(first.var().item() - 1 / 12) < 0.01


def test_complementary_masks_partition_the_answer():
    ids, index = torch.arange(40).view(4, 10), torch.arange(4)
    one = mask_tokens(ids, index, 99, seed=0, step=3)
    two = mask_tokens(ids, index, 99, seed=0, step=3, complementary=True)
    assert torch.equal(one.masked, ~two.masked)
    assert torch.allclose(1 / one.weight + 1 / two.weight, torch.ones(4, 1), atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"masking": "block", "block_length": 2}], ids=["random", "block"])
def test_noise_levels_cover_t_min_to_t_max_and_no_more(options):
    settings = ObjectiveConfig(t_min=0.3, t_max=0.6, truncate_probability=0.0, **options)
    (view,) = Objective(tiny_network(), settings, seed=0, length=LENGTH).masking.views(batch(64))
    p = 1 / (view.weight * LENGTH * 64)
    assert 0.299 < p.min() < 0.32 and 0.58 < p.max() < 0.601


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
            before = int(opens and i > 0 and masking != "causal")  # the end-of-text that a shifted one predicts from
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
