"""Logits of a large vocabulary: few of them in memory at a time, made in the autocast dtype and reduced in fp32."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlm.models import ModelConfig, Transformer
from dlm.training.batch import Batch
from dlm.training.objective import Objective
from dlm.training.sections import ObjectiveConfig

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
    with Logits() as whole:
        loss, gradients = run(objective, bf16)
    assert whole.peak >= 2 * 4 * VOCAB * tokens  # log p, which autograd keeps, and its gradient
    monkeypatch.setattr("dlm.training.scoring.LOGITS_AT_ONCE", MOST * VOCAB)
    with Logits() as parts:
        sliced, pieces = run(objective, bf16)
    assert parts.peak <= 4 * 4 * VOCAB * MOST < whole.peak / 5
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
