"""What a training step of a 1.7B model needs in memory, with the vocabulary's logits a slice at a time and all at once.

    python benchmarks/memory.py              # a table, and benchmarks/results/memory-cpu.json; some minutes

The model has 151,936 tokens at 4,096 positions. Its step runs with tensors that have shapes and no memory (torch's
FakeTensorMode), every storage counted from its allocation to its release; what the optimiser holds is added. That a real
step keeps to this is what tests/training/test_memory.py is about.
"""

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import RESULTS, parser, write
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlm.evaluation.table import markdown
from dlm.models import ModelConfig, Transformer, transformer
from dlm.models.rope import rope_frequencies
from dlm.training import scoring
from dlm.training.objective import Objective
from dlm.training.scoring import in_slices, two_streams
from dlm.training.sections import ObjectiveConfig

CARD = 24e9
QWEN3 = ModelConfig(  # of 1.7B
    vocab_size=151_936, mask_token_id=151_935, eos_token_id=151_643, hidden_size=2048, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=6144, qk_norm=True,
    max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One step: every token is asked for, as at the highest noise level; weights in fp32, bf16 autocast."""

    trained: str = "all weights"
    sliced: bool = True
    checkpointing: bool = True
    streams: int = 1
    sequences: int = 1
    length: int = 4096

    def describe(self) -> dict[str, Any]:
        return {
            "trained": self.trained,
            "batch": f"{self.sequences} x {self.length:,}" + (", two streams" if self.streams == 2 else ""),
            "layers": "recomputed" if self.checkpointing else "kept",
            "logits": "in slices" if self.sliced else "at once",
        }


LORA = "LoRA, base in bf16"
STEPS: list[dict[str, Any]] = [{}, {"checkpointing": False}, {"trained": LORA}]
STEPS += [{"trained": LORA, "streams": 2}, {"trained": LORA, "sequences": 4}]
CASES = [Case(sliced=sliced, **step) for step in STEPS for sliced in (True, False)]


class Storages(TorchDispatchMode):
    """Bytes of all storages that were made in this context and are alive, and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.alive:
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        return out

    def _drop(self, storage: int, size: int) -> None:
        self.alive.discard(storage)
        self.now -= size


class Adapted(nn.Module):
    """A frozen matrix and what LoRA of rank 16 adds to it; peft's does not run without memory."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 16, bias=False)
        self.b = nn.Linear(16, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def build(case: Case) -> Objective:
    lora = case.trained == LORA
    torch.set_default_dtype(torch.bfloat16 if lora else torch.float32)
    network = Transformer(QWEN3).train()
    torch.set_default_dtype(torch.float32)
    network.gradient_checkpointing = case.checkpointing
    if lora:
        network.requires_grad_(False)
        for block in [part for layer in network.layers for part in (layer.attn, layer.mlp)]:
            for name in [name for name, child in block.named_children() if isinstance(child, nn.Linear)]:
                setattr(block, name, Adapted(getattr(block, name)))
    return Objective(network, ObjectiveConfig(), seed=0, length=case.length)


def loss(objective: Objective, case: Case) -> Tensor:
    """What `Objective.token_loss` does, without asking which tokens are asked for: shapes alone cannot tell."""
    network, positions, spec = objective.network, None, None
    targets = shown = torch.zeros(case.sequences, case.length, dtype=torch.long)
    if case.streams == 2:
        shown, positions, spec = two_streams(targets, targets, 4)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = network.hidden(shown, positions, attention=spec)
        states = (spec or network.attention).states(hidden, False).flatten(0, 1)
        return in_slices(objective.token_parts, network.config.vocab_size, states, targets.flatten()).mean()


def rope_of(config: ModelConfig) -> Tensor:
    """The frequencies as a real tensor: they are looked at when a network is built."""
    with unset_fake_temporarily():
        return rope_frequencies(config)


def count(case: Case) -> dict[str, float]:
    """Bytes of a step by its shapes: weights, what the optimiser holds, and the peaks of both passes without it."""
    at_once = scoring.LOGITS_AT_ONCE if case.sliced else 2**62
    with (
        patch.object(scoring, "LOGITS_AT_ONCE", at_once),
        patch.object(transformer, "rope_frequencies", rope_of),
        FakeTensorMode(allow_non_fake_inputs=True),
        Storages() as storages,
    ):
        objective = build(case)
        weights = sum(p.numel() * p.element_size() for p in objective.parameters())
        trained = sum(p.numel() for p in objective.parameters() if p.requires_grad)
        before = storages.now
        storages.peak = 0
        found = loss(objective, case)
        forward, storages.peak = storages.peak - before, 0
        found.backward()
        backward = storages.peak - before
    return {
        "weights": weights,
        "gradients": 4 * trained,
        "optimiser": 8 * trained,  # AdamW's two moments in fp32
        "forward": forward,
        "backward": backward,  # gradients included
        "peak": weights + 8 * trained + max(forward, backward),
    }


def main(argv: list[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    options = words.parse_args(argv)
    torch.set_num_threads(1)
    large = [case.describe() | {k: round(v / 1e9, 2) for k, v in count(case).items()} for case in CASES]
    for row in large:
        row["24 GB"] = "fits" if row["peak"] * 1e9 < CARD else "no"
    print(f"1.7B parameters, 151,936 tokens: GB by shapes\n\n{markdown(large)}\n")
    facts = {"torch": torch.__version__, "logits_at_once": scoring.LOGITS_AT_ONCE, "large": large}
    write(options.output / "memory-cpu.json", facts)


if __name__ == "__main__":
    main()
