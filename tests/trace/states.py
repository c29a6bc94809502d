"""Every state of thousands of traces comes back: each canvas is kept, and compared after each step.

    python -m tests.trace.states --traces 10000      # prints a summary; fails at the first state that differs

A fifth of the traces are decoded by the engine, with tiny random models of every attention kind, under every rule. The
others are made by dice, which reach 4,096 tokens and 1,024 steps soon enough.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import dlm
from dlm.diffusion.unmask import RULES
from dlm.inference.readers import READ_BY
from dlm.inference.request import StepEvent
from dlm.trace import TraceStore
from tests.inference.tiny import tiny_lm
from tests.trace.synthetic import anything

LONGEST, MOST_STEPS = 4096, 1024
BY_ENGINE = 5  # of so many traces one
Canvases = list[np.ndarray]

MODELS: dict[str, dict[str, Any]] = {
    "bidirectional": {"max_position_embeddings": 4096},
    "block_causal": {"model_type": "sdar", "attention": "block_causal", "block_length": 4},
    "causal": {
        "model_type": "llama",
        "attention": "causal",
        "shifted_logits": True,
        "mask_token_id": None,
        "mask_in_softmax": False,
    },
}
CACHES = {"bidirectional": ("none", "prefix", "dual"), "block_causal": ("auto", "none"), "causal": ("auto", "none")}
LARGE = (  # what a tiny model takes long for, a few times
    {"gen_length": 4032, "block_length": 4032, "steps": 16},
    {"gen_length": 2048, "block_length": 32, "steps": 64, "cache": "dual"},
    {"gen_length": 1024, "block_length": 128, "steps": 1024, "cache": "dual"},
    {"gen_length": 1024, "block_length": 1024, "steps": 48, "remask_threshold": 0.3, "temperature": 1.0},
)


def states(traces: int) -> dict[str, Any]:
    """Record so many traces, read each back, and compare every state with the canvas the sampler had."""
    rng, seen, sizes, revised = np.random.default_rng(0), Counter(), Counter(), 0
    with tempfile.TemporaryDirectory() as folder, TraceStore(Path(folder) / "traces.db", "none") as store:
        decoded = by_engine(store, rng)
        for i in range(traces):
            if i % BY_ENGINE == 0:
                name, strategy, canvases = next(decoded)
            else:
                name, strategy, canvases = by_dice(store, rng, i)
            trace = store[name]
            trace.check()
            assert trace.num_steps == len(canvases) - 1, name
            for k, canvas in enumerate(canvases):
                state = trace.state(k)
                assert (state[: len(canvas)] == canvas).all(), (name, k)
                assert (state[len(canvas) :] == trace.mask_id).all(), (name, k)
            seen.update(strategy)
            sizes.update(states=len(canvases), tokens=sum(map(len, canvases)))
            sizes["longest"], sizes["most steps"] = (
                max(sizes["longest"], trace.length),
                max(sizes["most steps"], trace.num_steps),
            )
            revised += bool(len(trace.later))
            if (i + 1) % 500 == 0:
                print(f"{i + 1} traces, {sizes['states']:,} states compared", file=sys.stderr, flush=True)
    return {
        "traces": traces,
        **sizes,
        "with edits, remasks or refused drafts": revised,
        "of": dict(sorted(seen.items())),
    }


def by_dice(store: TraceStore, rng: np.random.Generator, number: int) -> tuple[str, list[str], Canvases]:
    """A sampler made of dice, of any length and number of steps."""
    made = anything(rng, LONGEST, MOST_STEPS, name=f"dice {number}")
    store.put(made.trace)
    return made.trace.request_id, ["dice"], made.canvases


def by_engine(store: TraceStore, rng: np.random.Generator) -> Iterator[tuple[str, list[str], Canvases]]:
    """Requests in batches, under settings at random; the canvases are those that the engine tells at each step."""
    lms = {kind: tiny_lm(4, spread=0.4, **fields) for kind, fields in MODELS.items()}
    number = 0
    for batch in count():
        if batch % 20 == 0 and batch // 20 < len(LARGE):
            kind, settings, holes = "bidirectional", dict(LARGE[batch // 20]), False
        else:
            kind, settings, holes = drawn(rng)
        keep = [part for part in ("confidence", "topk", "digests") if rng.random() < 0.4]
        mask, store.keep = MODELS[kind].get("mask_token_id", 63), tuple(keep)
        prompts = [rng.integers(0, 60, int(rng.integers(1, 65))).tolist() for _ in range(int(rng.integers(1, 9)))]
        if "rule" not in settings:  # a large one: alone
            prompts = prompts[:1]
        if holes:
            prompts = [[mask if rng.random() < 0.4 else token for token in prompt] + [mask] for prompt in prompts]
        names = [f"engine {number + i}" for i in range(len(prompts))]
        canvases: dict[str, Canvases] = {name: [] for name in names}

        def keep_canvases(event: StepEvent, canvases: dict[str, Canvases] = canvases) -> None:
            for row, (name, length) in enumerate(zip(event.request_ids, event.lengths, strict=True)):
                canvases[name].append(event.canvas[row, :length].numpy().copy())

        decode = dlm.infill if holes else dlm.generate
        decode(lms[kind], prompts, trace=store, request_ids=names, on_step=keep_canvases, **settings)
        number += len(prompts)
        tags = [
            kind,
            "infilling" if holes else "generation",
            *(f"{key} {settings[key]}" for key in ("rule", "strategy", "cache") if key in settings),
            *(key for key in ("edit_threshold", "remask_threshold", "cfg_scale") if key in settings),
        ]
        for name, prompt in zip(names, prompts, strict=True):
            yield name, ["engine", *tags], [np.array(prompt), *canvases[name]]


def drawn(rng: np.random.Generator) -> tuple[str, dict[str, Any], bool]:
    """A kind of model, settings, and whether there are holes to fill."""

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    kind = str(rng.choice(list(MODELS), p=[0.5, 0.4, 0.1]))
    block = 4 * int(np.exp(rng.uniform(0, np.log(16))))
    blocks = int(np.exp(rng.uniform(0, np.log(8))))
    settings: dict[str, Any] = {
        "rule": str(rng.choice(list(RULES))),
        "cache": str(rng.choice(CACHES[kind])),
        "seed": int(rng.integers(1000)),
        "temperature": float(rng.choice([0.0, 0.7, 1.5])),
    }
    threshold = float(rng.uniform(0.1, 0.9))
    if settings["rule"] in READ_BY["threshold"]:
        settings["threshold"] = threshold
    if kind == "causal":
        settings.pop("threshold", None)
        return kind, {**settings, "gen_length": block, "rule": "low_confidence"}, False
    holes = chance(0.25)
    settings |= {"edit_threshold": 0.25} if chance(0.3) else {}
    settings |= {"remask_threshold": 0.2} if chance(0.3) else {}
    settings |= {"cfg_scale": 0.5} if chance(0.15) else {}
    if holes:
        return kind, {**settings, "steps": int(rng.integers(1, 12))}, True
    settings |= {"strategy": "multi_block"} if chance(0.3) else {"strategy": "block"}
    if kind == "block_causal":
        block = 4
    settings["block_length"] = block
    if chance(0.2):
        return kind, {**settings, "gen_length": "auto", "max_gen_length": block * blocks}, False
    return kind, {**settings, "gen_length": block * blocks, "steps": blocks * int(rng.integers(1, block + 1))}, False


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--traces", type=int, default=10_000)
    print(json.dumps(states(words.parse_args().traces), indent=1))
