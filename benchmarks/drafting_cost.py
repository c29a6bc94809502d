"""What drafting and checking cost beside a plain step, with random weights: the time does not depend on them.

`benchmarks/speculative.py --cost` prints it. A speed-up is τ over that cost: so it also says which τ pays.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from measuring import machine

import dlm
from dlm.bench.peak import Peak
from dlm.models.config import ModelConfig
from dlm.models.draft import Draft

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "heads": (4, 2, 16),
        "intermediate_size": 128,
        "vocab_size": 512,
        "draft": (2, None),
    },
    "smollm2": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "heads": (9, 3, 64),
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "draft": (2, 8192),
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "heads": (32, 8, 128),
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "draft": (5, None),
    },
}
"""`draft`: its layers, and how many tokens it can draft."""
PUBLISHED_TAU = 6.49
"""Tokens a verification of DFlash on Qwen3-8B (arXiv 2602.06036)."""


def cost(options: Any) -> dict[str, Any]:
    """A row for each batch and number of drafted tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = options.shape or ("qwen3-8b" if device == "cuda" else "tiny")
    lm, layers, tokens = _target(name, device)
    lengths = [length for length in options.lengths if length < 16]
    draft = Draft.fresh(
        lm,
        num_layers=layers,
        block_size=max(lengths) + 1,
        mask_token_id=lm.config.vocab_size - 1,
        tokens=None if tokens is None else range(0, lm.config.vocab_size, lm.config.vocab_size // tokens),
    )
    rows, clock = [], clock_of(device)
    for batch in options.batches:
        plain, memory = _step(lm, None, batch, options.tokens, clock)
        for length in lengths:
            own, more = _step(lm, draft, batch, options.tokens, clock, draft_length=length)
            rows.append(
                {
                    "batch": batch,
                    "drafted": length,
                    "plain step, ms": round(1e3 * plain, 3),
                    "draft + check, ms": round(1e3 * own, 3),
                    "τ to break even": round(own / plain, 2),
                    "τ for 1.3 ×": round(1.3 * own / plain, 2),
                    f"× plain at τ = {PUBLISHED_TAU}": round(PUBLISHED_TAU * plain / own, 2)
                    if length + 1 >= PUBLISHED_TAU
                    else "",
                    "peak, MiB": f"{memory / 2**20:.0f} → {more / 2**20:.0f}",
                }
            )
    return {"shape": name, "threads": torch.get_num_threads(), **machine(device), "rows": rows}


def clock_of(device: str) -> Callable[[], float]:
    """The process's own time, where one thread does all of the work; else that on the wall."""
    return time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _target(name: str, device: str) -> tuple[dlm.LM, int, int | None]:
    shape = dict(SHAPES[name])
    (heads, key_heads, head_dim), (layers, tokens) = shape.pop("heads"), shape.pop("draft")
    config = ModelConfig(
        model_type="qwen3",
        attention="causal",
        shifted_logits=True,
        qk_norm=True,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        **shape,
    )
    with torch.device(device):
        network = dlm.Transformer(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    network.initialise(torch.Generator(device).manual_seed(0))
    return dlm.LM(network.eval(), name="random"), layers, tokens


def _step(
    lm: dlm.LM, draft: Draft | None, batch: int, tokens: int, clock: Callable[[], float], **more: Any
) -> tuple[float, int]:
    """A step's seconds, the median, and the most memory that any took."""
    with Peak(lm.device) as peak:
        engine = dlm.Engine(lm, draft=draft, num_pages=batch * 16, max_num_requests=batch)
        for i in range(batch):
            engine.add_request([7 + i, *range(100, 131)], request_id=str(i), gen_length=tokens, **more)
        steps = []
        while engine.has_work:
            began = clock()
            engine.step()
            if lm.device.type == "cuda":
                torch.cuda.synchronize()
            steps.append(clock() - began)
        engine.close()
    return median(steps[4 : max(5, len(steps) // 2)]), peak.bytes
