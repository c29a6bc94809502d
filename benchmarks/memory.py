"""What a training step needs in memory, with the vocabulary's logits a slice at a time and all at once.

    python benchmarks/memory.py              # tables, and benchmarks/results/memory-cpu.json; some minutes

Two tables. The first is a 1.7B model with 151,936 tokens at 4,096 positions, its step run with tensors that have shapes and
no memory (torch's FakeTensorMode), every storage counted from its allocation to its release; what the optimiser holds is
added. The second runs a small network for real on this CPU, each time in a process of its own, and sets what the
operating system saw (peak RSS) beside the same count.
"""

import argparse
import json
import resource
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlm.models import ModelConfig, Transformer
from dlm.training import scoring
from dlm.training.objective import Objective
from dlm.training.scoring import in_slices, two_streams
from dlm.training.sections import ObjectiveConfig

RESULTS = Path(__file__).parent / "results"
CARD = 24e9
VOCABULARY = {"vocab_size": 151_936, "mask_token_id": 151_935, "eos_token_id": 151_643, "tie_word_embeddings": True}
LARGE = ModelConfig(  # Qwen3-1.7B's shape
    hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    intermediate_size=6144, qk_norm=True, max_position_embeddings=40_960, **VOCABULARY,
)  # fmt: skip
SMALL = ModelConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=176, **VOCABULARY,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One step: every token is asked for, as at the highest noise level; weights in fp32, bf16 autocast."""

    large: bool = True
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


CASES = [
    Case(trained=trained, sliced=sliced, **options)
    for trained, options in (
        ("all weights", {}),
        ("all weights", {"checkpointing": False}),
        ("LoRA, base in bf16", {}),
        ("LoRA, base in bf16", {"streams": 2}),
        ("LoRA, base in bf16", {"sequences": 4}),
    )
    for sliced in (True, False)
]
SMALL_CASES = [
    Case(large=False, length=length, sliced=sliced, checkpointing=False)
    for length in (1024, 2048)
    for sliced in (True, False)
]


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
    lora = case.trained.startswith("LoRA")
    torch.set_default_dtype(torch.bfloat16 if lora else torch.float32)
    network = Transformer(LARGE if case.large else SMALL).train()
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


@contextmanager
def slicing(case: Case) -> Iterator[None]:
    usual = scoring.LOGITS_AT_ONCE
    scoring.LOGITS_AT_ONCE = usual if case.sliced else 2**62
    try:
        yield
    finally:
        scoring.LOGITS_AT_ONCE = usual


def count(case: Case) -> dict[str, float]:
    """Bytes of a step by its shapes: weights, what the optimiser holds, and the peaks of both passes without it."""
    with slicing(case), FakeTensorMode(), Storages() as storages:
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


def measure(case: Case) -> float:
    """Bytes that a step adds to the peak RSS of this process."""
    with slicing(case):
        objective = build(case)
        for p in objective.parameters():
            torch.nn.init.normal_(p, std=0.02)
        warm = replace(case, length=8)
        loss(objective, warm).backward()  # what is loaded and kept at the first use is not the step's
        objective.zero_grad()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loss(objective, case).backward()
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.measure is not None:
        print(measure(SMALL_CASES[options.measure]))
        return
    large = [case.describe() | {k: round(v / 1e9, 2) for k, v in count(case).items()} for case in CASES]
    for row in large:
        row["24 GB"] = "fits" if row["peak"] * 1e9 < CARD else "no"
    _print("1.7B parameters, 151,936 tokens: GB by shapes", large)
    small = []
    for number, case in enumerate(SMALL_CASES):
        counted = count(case)
        command = [sys.executable, __file__, "--measure", str(number)]
        seen = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        row = {"batch": f"1 x {case.length:,}", "logits": case.describe()["logits"]}
        step = max(counted["forward"], counted["backward"])
        small.append(row | {"counted MB": round(step / 1e6), "measured MB": round(seen / 1e6)})
    _print(f"{SMALL.hidden_size} wide, 2 layers, 151,936 tokens: MB a step adds, on this CPU", small)
    options.output.mkdir(parents=True, exist_ok=True)
    facts = {"torch": torch.__version__, "logits_at_once": scoring.LOGITS_AT_ONCE, "large": large, "small": small}
    (options.output / "memory-cpu.json").write_text(json.dumps(facts, indent=1) + "\n")


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0]}
    print(f"\n{title}\n")
    for row in ({name: name for name in widths}, *rows):
        print("  ".join(f"{row[name]!s:>{width}}" for name, width in widths.items()))


if __name__ == "__main__":
    main()
