"""What text costs under each kind of attention, against enumeration; and the vocabulary a part at a time."""

import math
import weakref
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlm.diffusion.bound import estimate, likelihood_bound
from dlm.models import ModelConfig, Transformer
from dlm.training.batch import Batch
from dlm.training.objective import Objective
from dlm.training.run import Run
from dlm.training.scoring import in_slices, sequence_nats
from dlm.training.sections import ObjectiveConfig
from dlm.training.validate import HeldOut
from tests.diffusion.enumeration import MASK, autoregressive_nats, block_nats, exact_bound, masked_nats, tiny_network
from tests.refusals import refused
from tests.training.runs import config

IDS = [2, 0, 3, 1]
EOS = 1


def network_of(kind: str, **changes):
    return tiny_network(attention=kind, eos_token_id=EOS, num_hidden_layers=2, **changes)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("block_length", [2, 3])
def test_block_diffusion_costs_its_blocks_each_given_the_clean_text_before_it(block_length, shifted):
    network = network_of("block_causal", block_length=block_length, shifted_logits=shifted)
    tables = block_nats(network, IDS, block_length)
    exact = sum(exact_bound(table, len(next(iter(table)))) for table in tables)
    draws = sequence_nats(network, torch.tensor([IDS]).repeat(2000, 1))
    assert abs(draws.mean().item() - exact) < 4 * draws.std().item() / 2000**0.5
    found = estimate(sequence_nats(network, torch.tensor([IDS]), samples=100), tokens=4)
    assert abs(found.nats - exact) < 4 * found.error < exact


def test_both_estimators_agree_in_blocks():
    network = network_of("block_causal", block_length=2)
    tables = block_nats(network, IDS, 2)
    exact = sum(exact_bound(table, 2) for table in tables)

    def nats(shown, asked):  # by the table, a token's share each: only the sums count
        costs = []
        for row in asked:
            for k, table in enumerate(tables):
                here = tuple(row[2 * k : 2 * k + 2].tolist())
                costs += [table[here] / sum(here)] * sum(here) if any(here) else []
        return torch.tensor(costs)

    ids = torch.tensor([IDS]).repeat(1500, 1)
    for estimator in ("exact_count", "bernoulli"):
        draws = likelihood_bound(nats, ids, MASK, estimator=estimator, block_length=2)
        assert abs(draws.mean().item() - exact) < 4 * draws.std().item() / 1500**0.5


def test_blocks_of_one_token_are_the_autoregressive_likelihood_exactly():
    network = network_of("block_causal", block_length=1)
    exact = sum(table[(True,)] for table in block_nats(network, IDS, 1))
    draws = sequence_nats(network, torch.tensor([IDS]), samples=3)
    assert draws.flatten().tolist() == pytest.approx([exact] * 3, rel=1e-5)


@pytest.mark.parametrize("shifted", [False, True])
def test_one_block_is_the_bound_of_masked_diffusion(shifted):
    block = network_of("block_causal", block_length=4, shifted_logits=shifted)
    whole = network_of("bidirectional", shifted_logits=shifted)
    ids = torch.tensor([IDS, IDS[::-1]])
    torch.testing.assert_close(sequence_nats(block, ids, samples=5), sequence_nats(whole, ids, samples=5))
    if not shifted:
        exact = exact_bound(masked_nats(whole, IDS), 4)
        assert sequence_nats(block, ids[:1], samples=60).mean().item() == pytest.approx(exact, rel=0.1)


def test_a_causal_network_costs_its_likelihood_from_end_of_text_on():
    network = network_of("causal", shifted_logits=True)
    ids = torch.tensor([IDS, IDS[::-1]])
    draws = sequence_nats(network, ids, samples=7)
    assert draws.shape == (2, 1)
    exact = [autoregressive_nats(network, row, EOS) for row in ids.tolist()]
    assert draws.flatten().tolist() == pytest.approx(exact, rel=1e-5)
    found = estimate(draws, tokens=8, exact=True)
    assert found.error == 0 and found.nats == pytest.approx(sum(exact), rel=1e-5)
    answer = torch.tensor([[False, False, True, True]])
    rest = autoregressive_nats(network, IDS, EOS) - autoregressive_nats(network, IDS[:2], EOS)
    assert sequence_nats(network, ids[:1], answer=answer).item() == pytest.approx(rest, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("causal", {"shifted_logits": True}),
        ("block_causal", {"block_length": 1}),
        ("block_causal", {"block_length": 1, "shifted_logits": True}),
    ],
)
def test_the_probabilities_of_all_texts_add_up_to_one(kind, options):
    network = network_of(kind, **options)
    texts = torch.tensor(list(product(range(MASK), repeat=3)))
    assert (-sequence_nats(network, texts)).exp().sum().item() == pytest.approx(1, rel=1e-4)


def test_a_bound_claims_no_more_probability_than_there_is():
    network = network_of("block_causal", block_length=2)
    claimed = 0.0
    for text in product(range(MASK), repeat=3):
        tables = block_nats(network, list(text), 2)
        claimed += math.exp(-sum(exact_bound(table, len(next(iter(table)))) for table in tables))
    assert 0.5 < claimed < 1


def test_a_prompt_is_given_in_blocks_too():
    network = network_of("block_causal", block_length=2)
    answer = torch.tensor([[False, True, True, False]]).repeat(1000, 1)
    draws = sequence_nats(network, torch.tensor([IDS]).repeat(1000, 1), answer=answer)
    first, second = block_nats(network, IDS, 2)
    assert draws.flatten().tolist() == pytest.approx([first[False, True] + second[True, False]] * 1000, rel=1e-4)


def test_the_draws_of_blocks_do_not_depend_on_the_batch():
    network = network_of("block_causal", block_length=2)
    ids = torch.randint(0, MASK, (6, 4), generator=torch.Generator().manual_seed(1))
    whole = sequence_nats(network, ids, samples=3)
    parts = [sequence_nats(network, ids[i : i + 2], index=torch.arange(i, i + 2), samples=3) for i in (0, 2, 4)]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_a_vocabulary_in_parts_costs_the_same(monkeypatch):
    network, ids = network_of("bidirectional"), torch.tensor([IDS]).repeat(5, 1)
    whole = sequence_nats(network, ids, samples=2)
    rows = []

    def score(states, targets):
        rows.append(len(states))
        return states.sum(-1)

    monkeypatch.setattr("dlm.training.scoring.LOGITS_AT_ONCE", 3 * network.config.vocab_size)
    assert len(in_slices(score, network.config.vocab_size, torch.ones(8, 2), torch.zeros(8))) == 8
    assert rows == [3, 3, 2]
    torch.testing.assert_close(sequence_nats(network, ids, samples=2), whole)


@pytest.mark.parametrize(
    ("kind", "options", "missing"),
    [("causal", {"eos_token_id": None}, "eos_token_id"), ("bidirectional", {"mask_token_id": None}, "mask_token_id")],
)
def test_a_network_without_the_token_it_needs_says_so(kind, options, missing):
    refused(missing, sequence_nats, tiny_network(attention=kind, **options), torch.tensor([IDS]))


def test_the_bound_does_not_depend_on_its_batches(tmp_path):
    run = Run(config(tmp_path))
    held = [HeldOut.of(run.config.data, run.model.tokenizer, 16, 8, size, 0) for size in (2, 8)]
    assert held[0].bound(run.model, 2).nats == pytest.approx(held[1].bound(run.model, 2).nats, rel=1e-5)


VOCAB, LENGTH, ROWS = 4000, 64, 4
MOST = 16  # rows of logits a slice
WIDTH = 24


class Logits(TorchDispatchMode):
    """What stands in memory of tensors as wide as the vocabulary, weights turned round aside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (VOCAB,) and len(tensor) != WIDTH:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.seen and storage.nbytes():
                    self._add(storage, tensor)
        return out

    def _add(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        self.seen.add(address)
        self.dtypes.add(tensor.dtype)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.now -= size


def objective_of() -> Objective:
    shape = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"head_dim": 12, "intermediate_size": 24, "mask_token_id": VOCAB - 1, "initializer_range": 0.3}
    network = Transformer(ModelConfig(vocab_size=VOCAB, **shape))
    network.initialise(torch.Generator().manual_seed(0))
    config = ObjectiveConfig(t_min=1.0, truncate_probability=0.0)  # everything is masked: as many logits as can be
    return Objective(network, config, seed=0, length=LENGTH)


def batch() -> Batch:
    ids = torch.randint(0, VOCAB - 1, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(ROWS), 0, ROWS)


def run(objective: Objective, bf16: bool) -> tuple[float, list[torch.Tensor]]:
    objective.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = sum(objective(batch()).values())
    assert loss.dtype == torch.float32
    loss.backward()
    return loss.item(), [p.grad.clone() for p in objective.parameters()]


@pytest.mark.parametrize("bf16", [False, True])
def test_logits_of_a_slice_are_all_there_ever_are(monkeypatch, bf16):
    objective, tokens = objective_of(), ROWS * LENGTH
    monkeypatch.setattr("dlm.diffusion.head_loss.SLICE", tokens * VOCAB)
    with Logits() as whole:
        loss, gradients = run(objective, bf16)
    assert whole.peak >= 4 * VOCAB * tokens  # log p; its gradient takes its place
    monkeypatch.setattr("dlm.diffusion.head_loss.SLICE", MOST * VOCAB)
    with Logits() as parts:
        sliced, pieces = run(objective, bf16)
    assert parts.peak <= 3 * 4 * VOCAB * MOST < whole.peak / 5
    assert sliced == pytest.approx(loss, rel=1e-5)
    assert {torch.float32} | ({torch.bfloat16} if bf16 else set()) == parts.dtypes
    for a, b in zip(gradients, pieces, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).norm() <= (5e-3 if bf16 else 1e-5) * a.norm()


def test_nothing_as_wide_as_the_vocabulary_is_kept_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr("dlm.training.scoring.LOGITS_AT_ONCE", MOST * VOCAB)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        sum(objective_of()(batch()).values())
    assert kept and not [shape for shape in kept if len(shape) == 2 and shape[-1] == VOCAB]
