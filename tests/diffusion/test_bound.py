"""The likelihood and its bound against the enumeration of all masks."""

import pytest
import torch
import torch.nn.functional as F

from dlm.diffusion.bound import estimate, likelihood_bound, with_error
from tests.diffusion.enumeration import LENGTH, MASK, exact_bound, masked_nats, tiny_network

IDS = [2, 0, 3, 1]


def nats_of(network, ids):
    """What `likelihood_bound` asks for."""
    return lambda shown, asked: F.cross_entropy(network.predict(shown, asked), ids[asked], reduction="none")


@pytest.mark.parametrize("estimator", ["exact_count", "bernoulli"])
def test_the_estimate_is_within_four_standard_errors_of_the_enumeration(estimator):
    network = tiny_network()
    exact = exact_bound(masked_nats(network, IDS), LENGTH)
    ids = torch.tensor([IDS]).repeat(4000, 1)
    draws = likelihood_bound(nats_of(network, ids), ids, MASK, samples=1, estimator=estimator)
    mean, error = draws.mean().item(), (draws.std() / len(draws) ** 0.5).item()
    assert abs(mean - exact) < 4 * error
    assert error / exact < (0.02 if estimator == "exact_count" else 0.05)  # 1/t has a heavy tail


def test_exact_counts_vary_less_than_bernoulli_masks():
    network, ids = tiny_network(), torch.tensor([IDS]).repeat(4000, 1)
    nats = nats_of(network, ids)
    one, other = (likelihood_bound(nats, ids, MASK, estimator=e).var() for e in ("exact_count", "bernoulli"))
    assert one < other


def test_several_draws_of_one_sequence_have_an_honest_standard_error():
    network = tiny_network()
    exact = exact_bound(masked_nats(network, IDS), LENGTH)
    ids = torch.tensor([IDS])
    draws = likelihood_bound(nats_of(network, ids), ids, MASK, samples=800)
    found = estimate(draws, tokens=LENGTH, bytes=8)
    assert abs(found.nats - exact) < 4 * found.error
    assert found.per_token[0] == pytest.approx(found.nats / 4)
    assert found.bits_per_byte[0] == pytest.approx(found.nats / 8 / 0.6931471805599453)


def test_the_error_is_that_of_the_mean_of_all_draws():
    found = estimate(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), tokens=8)
    assert (found.nats, found.error) == (4.0, 1.0)  # the mean of 1 and 3 has a variance of 2 / 2


def test_the_draws_of_a_sequence_mask_every_number_of_tokens_once():
    network, ids, counts = tiny_network(), torch.tensor([IDS]).repeat(50, 1), []

    def nats(shown, asked):
        counts.append(asked.sum(-1))
        return nats_of(network, ids)(shown, asked)

    likelihood_bound(nats, ids, MASK, samples=LENGTH)
    assert (torch.stack(counts).sort(0).values == torch.arange(1, LENGTH + 1)[:, None]).all()
    assert len({tuple(row) for row in torch.stack(counts).T.tolist()}) == LENGTH  # the first is any


def test_a_conditional_bound_masks_the_answer_only():
    network = tiny_network()
    seen = []
    ids = torch.tensor([IDS]).repeat(3000, 1)
    answer = torch.tensor([False, True, False, True]).repeat(3000, 1)

    def nats(shown, asked):
        seen.append(shown)
        return nats_of(network, ids)(shown, asked)

    draws = likelihood_bound(nats, ids, MASK, answer=answer)
    assert torch.equal(seen[0][:, [0, 2]], ids[:, [0, 2]])
    table = masked_nats(network, IDS)
    # two unknowns: one of them alone (each with probability 1/4, weight 2) or both (1/2, weight 1)
    exact = 0.5 * sum(table[False, one, False, other] for one, other in ((True, False), (False, True), (True, True)))
    assert abs(draws.mean().item() - exact) < 4 * draws.std().item() / 3000**0.5


def test_the_masks_do_not_depend_on_the_batch():
    network = tiny_network()
    ids = torch.randint(0, MASK, (6, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = likelihood_bound(nats_of(network, ids), ids, MASK, samples=3)
    parts = [
        likelihood_bound(nats_of(network, part), part, MASK, index=torch.arange(2 * i, 2 * i + 2), samples=3)
        for i, part in enumerate(ids.split(2))
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_a_single_draw_has_no_error():
    single = estimate(torch.tensor([[4.0], [2.0]]), tokens=3, bytes=6)
    assert single.per_token == (2.0, None) and single.bits_per_byte == (pytest.approx(1 / 0.6931471805599453), None)
    assert estimate(torch.tensor([[4.0]]), tokens=2, exact=True).per_token == (2.0, 0.0)
    assert with_error(2.0, None) == "2.000 (one draw: no error)"
    assert with_error(2.0, 0.25, ".2f") == "2.00 ± 0.25"
