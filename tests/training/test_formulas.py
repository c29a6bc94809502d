"""Loss and gradient of every objective against its formula in float64, and what block diffusion is at its ends."""

import pytest
import torch
import torch.nn.functional as F

from dlm.diffusion.loss import token_losses
from dlm.diffusion.noise import EPSILON, mask_probability
from dlm.diffusion.rng import Purpose, uniform
from dlm.training.batch import Batch
from dlm.training.objective import Objective
from dlm.training.sections import ObjectiveConfig
from tests.diffusion.enumeration import MASK, tiny_network
from tests.training.oracle import Oracle, autoregression, block_diffusion, masked_diffusion

ROWS, LENGTH, EOS = 4, 6, 0
IDS = torch.randint(0, MASK, (ROWS, LENGTH), generator=torch.Generator().manual_seed(4))
SHIFTS = pytest.mark.parametrize("shifted", [False, True])


def network_of(kind: str = "bidirectional", **changes):
    shape = {"num_hidden_layers": 2, "eos_token_id": EOS, "initializer_range": 0.5}
    return tiny_network(attention=kind, **{**shape, **changes}).train()


def batch(answer: torch.Tensor | None = None, step: int = 0) -> Batch:
    answer = torch.ones_like(IDS, dtype=torch.bool) if answer is None else answer
    return Batch(IDS, answer, torch.arange(ROWS), step, ROWS)


def objective_of(network, **options) -> Objective:
    return Objective(network, ObjectiveConfig(truncate_probability=0.0, **options), seed=3, length=LENGTH)


def loss_of(objective: Objective, rows: Batch) -> torch.Tensor:
    return sum(objective(rows).values())


def asked_of(objective: Objective, rows: Batch) -> list[list[list[int]]]:
    """For each view, each row's asked positions."""
    return [[row.nonzero().flatten().tolist() for row in view.predicted] for view in objective.masking.views(rows)]


def level(step: int, place: float) -> float:
    """An antithetic noise level: one shared number, moved on by the sample's share of the range."""
    u = uniform(Purpose.TIME, seed=3, step=step).item()
    return (1 - EPSILON) * ((u + place) % 1) + EPSILON


def agrees(network, objective: Objective, rows: Batch, oracle: Oracle, wanted: torch.Tensor) -> None:
    loss = loss_of(objective, rows)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    wanted = oracle.gradient(wanted)
    for name, p in network.named_parameters():
        torch.testing.assert_close(p.grad.double(), wanted[name], rtol=1e-3, atol=1e-5, msg=name)


@SHIFTS
@pytest.mark.parametrize("masking", ["random", "complementary"])
def test_masked_diffusion_is_its_formula(masking, shifted):
    network = network_of(shifted_logits=shifted)
    objective, rows, oracle = objective_of(network, masking=masking), batch(step=1), Oracle(network)
    p = [level(1, i / ROWS) for i in range(ROWS)]
    passes = asked_of(objective, rows)
    parts = [masked_diffusion(oracle, IDS.tolist(), passes[0], p)]
    if masking == "complementary":
        assert all(sorted(a + b) == list(range(LENGTH)) for a, b in zip(*passes, strict=True))
        parts.append(masked_diffusion(oracle, IDS.tolist(), passes[1], [1 - level for level in p]))
    agrees(network, objective, rows, oracle, sum(parts) / len(parts))


@SHIFTS
@pytest.mark.parametrize("size", [2, 3])
def test_block_diffusion_is_its_formula(size, shifted):
    network = network_of("block_causal", block_length=size, shifted_logits=shifted)
    objective, rows, oracle = objective_of(network, masking="block", block_length=size), batch(step=2), Oracle(network)
    blocks = LENGTH // size
    p = [[level(2, (k + i / ROWS) / blocks) for k in range(blocks)] for i in range(ROWS)]
    (asked,) = asked_of(objective, rows)
    assert any(asked)
    agrees(network, objective, rows, oracle, block_diffusion(oracle, IDS.tolist(), asked, p, size))


@pytest.mark.parametrize("answers", [[range(6)] * ROWS, [range(2, 6), range(5, 6), range(6), range(3, 6)]])
def test_autoregression_is_its_formula(answers):
    network = network_of("causal", shifted_logits=True)
    mine = torch.tensor([[i in here for i in range(LENGTH)] for here in answers])
    oracle = Oracle(network)
    agrees(
        network, objective_of(network, masking="causal"), batch(mine), oracle,
        autoregression(oracle, IDS.tolist(), answers),
    )  # fmt: skip


def test_blocks_of_one_masked_token_are_autoregression_without_the_shift():
    network = network_of("block_causal", block_length=1)
    objective = objective_of(network, masking="block", block_length=1, t_min=1.0)
    oracle, everything = Oracle(network), [list(range(LENGTH))] * ROWS
    assert asked_of(objective, batch())[0] == everything
    sequential = torch.zeros((), dtype=torch.float64)
    for text in IDS.tolist():
        for i in range(LENGTH):  # -log p(x_i | x_<i), a forward each
            (nats,) = oracle.nats([*text[:i], MASK], [i], text, lambda q, k: k <= q, False)
            sequential = sequential + nats / LENGTH / ROWS
    agrees(network, objective, batch(), oracle, sequential)


@SHIFTS
@pytest.mark.parametrize(
    "options", [{}, {"exact_count": True}, {"weighting": "uniform"}, {"antithetic": False}], ids=str
)
def test_one_block_is_masked_diffusion_on_the_same_masks(shifted, options):
    block = network_of("block_causal", block_length=LENGTH, shifted_logits=shifted)
    whole = network_of(shifted_logits=shifted)
    pair = [objective_of(block, masking="block", block_length=LENGTH, **options), objective_of(whole, **options)]
    for step in range(3):
        assert asked_of(pair[0], batch(step=step)) == asked_of(pair[1], batch(step=step))
        one, other = (loss_of(objective, batch(step=step)) for objective in pair)
        assert one.item() == pytest.approx(other.item(), rel=1e-5)
        one.backward(), other.backward()
    for a, b in zip(block.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)


@SHIFTS
def test_the_two_streams_say_what_each_block_says_alone(shifted):
    size = 4  # the last block is short
    network = network_of("block_causal", block_length=size, shifted_logits=shifted).eval()
    (view,) = objective_of(network, masking="block", block_length=size).masking.views(batch())
    with torch.no_grad():
        hidden = network.hidden(view.input_ids, view.positions, attention=view.attention)
        logits = network.head(view.states(hidden, shifted))
        for start in range(0, LENGTH, size):
            stop = min(start + size, LENGTH)
            alone = torch.cat((IDS[:, :start], view.input_ids[:, start:stop]), dim=1)
            rows = torch.zeros_like(alone, dtype=torch.bool)
            rows[:, start:] = True
            wanted = network.predict(alone, rows).view(ROWS, stop - start, -1)
            torch.testing.assert_close(logits[:, start:stop, :MASK], wanted[..., :MASK], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"masking": "block", "block_length": 2}, {"masking": "causal"}, {}], ids=str)
def test_a_batch_in_eight_parts_has_the_loss_and_gradient_of_the_whole(options):
    network = network_of("block_causal", block_length=2)
    objective = objective_of(network, **options)
    ids = IDS.repeat(2, 1)
    answer = torch.rand(8, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.7
    whole = Batch(ids, answer, torch.arange(8), 5, 8)
    loss_of(objective, whole).backward()
    together, loss = [p.grad.clone() for p in network.parameters()], loss_of(objective, whole).item()
    network.zero_grad()
    parts = [loss_of(objective, whole.rows(i, i + 1)) for i in range(8)]
    sum(parts).backward()
    assert sum(p.item() for p in parts) == pytest.approx(loss, rel=1e-5)
    for a, p in zip(together, network.parameters(), strict=True):
        torch.testing.assert_close(p.grad, a, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{"masking": "block", "block_length": 2}, {"masking": "causal"}, {}], ids=str)
def test_a_batch_that_asks_for_nothing_costs_nothing_and_reaches_every_weight(options):
    network = network_of("block_causal", block_length=2)
    loss = loss_of(objective_of(network, **options), batch(torch.zeros_like(IDS, dtype=torch.bool)))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in network.parameters())  # as DDP wants it


def test_a_prompt_is_never_masked_in_blocks_and_its_tail_stays_in_sight():
    network = network_of("block_causal", block_length=4)
    answer = torch.arange(LENGTH).expand(ROWS, LENGTH) >= 2
    objective = objective_of(network, masking="block", block_length=4)
    seen = torch.zeros(LENGTH, dtype=torch.bool)
    for step in range(20):
        (view,) = objective.masking.views(batch(answer, step))
        noisy, clean = view.input_ids.split(LENGTH, dim=1)
        assert torch.equal(noisy[:, :2], IDS[:, :2]) and torch.equal(clean, IDS)
        assert torch.equal(noisy == MASK, view.predicted)
        seen |= view.predicted.any(0)
    assert seen.tolist() == [False, False, True, True, True, True]
    oracle = Oracle(network)
    (view,) = objective.masking.views(batch(answer, 3))
    shares = [[level(3, (k + i / ROWS) / 2) for k in range(2)] for i in range(ROWS)]
    asked = [row.nonzero().flatten().tolist() for row in view.predicted]
    wanted = block_diffusion(oracle, IDS.tolist(), asked, shares, 4) * LENGTH / 4  # the mean is over the answer
    assert loss_of(objective, batch(answer, 3)).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_levels_of_blocks_are_spread_over_samples_and_blocks_and_can_be_narrowed():
    p = mask_probability(torch.arange(8, 12), seed=0, step=1, antithetic=True, batch=4, blocks=3)
    assert torch.allclose(p.flatten().sort().values.diff(), torch.full((11,), (1 - EPSILON) / 12), atol=1e-6)
    for row in p:  # each sample covers the range by itself
        assert torch.allclose(row.sort().values.diff(), torch.full((2,), (1 - EPSILON) / 3), atol=1e-6)
    free = mask_probability(torch.arange(2000), seed=0, step=1, blocks=3, low=0.3, high=0.8)
    assert free.shape == (2000, 3) and 0.3 <= free.min() < 0.31 and 0.79 < free.max() <= 0.8
    assert free.mean(0).tolist() == pytest.approx([0.55] * 3, abs=0.02)
    assert abs(torch.corrcoef(free.T)[0, 1].item()) < 0.1


def test_losses_of_half_precision_are_in_full_precision():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(6)
    found = token_losses(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), F.cross_entropy(logits.double(), targets, reduction="none"))
