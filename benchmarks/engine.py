"""How fast decoding is, beside Fast-dLLM's own code on the same weights, in one process: print a table, write JSON.

    python benchmarks/engine.py                                     # ours alone, against the plain matrix products
    python benchmarks/engine.py --peer-path ../Fast-dLLM            # its caches beside ours, the tokens compared
    python benchmarks/engine.py --vocab 126464 --steps 64 --peer-path ../Fast-dLLM
    python benchmarks/engine.py --batch --threads 2                 # eight requests together against one by one
    python benchmarks/engine.py --device cuda --shape llada-8b --roofline --graphs both --batch 1 8 64

Contenders take turns, so that ratios are taken under the same load; times are CPU time on a CPU (of one thread unless
`--threads` says more: then wall-clock). "floor" is nothing but the matrix products of a block's rows, by torch, with the
weights laid out as it likes them; "attention" nothing but their attention, by torch; "bare dual" both for every forward
of such a run; "modules dual" is ours without the C kernels, as where there is no C compiler; "deterministic" is ours with
matrix products that do not depend on the batch. Weights are random. Eight together are timed by both clocks: on a busy
machine threads that wait for each other stretch wall-clock time; the products beside them are those that ours uses.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import bare
import fast_dllm
import roofline
import torch
import torch.nn.functional as F
from measuring import (
    RESULTS,
    Job,
    in_turns,
    machine,
    parser,
    ratios,
    spread,
    write,
)

import dlm
from dlm.kernels.c import binding
from dlm.models import LM
from dlm.models.subnormals import subnormals_as_zeros

FLOOR_FORWARDS = 20


@subnormals_as_zeros()  # as dlm does for itself; so the peer has it too
def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    torch.set_num_threads(options.threads)
    if options.sync_debug:
        torch.cuda.set_sync_debug_mode(options.sync_debug)
    lm = roofline.make(options.shape, options.vocab, options.device)
    named = {key: value for key, value in vars(options).items() if key not in ("peer_path", "output")}
    facts = machine(options.device) | {"kernels": binding.unavailable() or binding.library()[1]}
    part = floors if options.roofline else batch if options.batch is not None else caches
    report = {"machine": facts, "options": named, part.__name__: part(lm, options)}
    print(json.dumps(report, indent=1))
    write(_file(options), report)
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    add = words.add_argument
    add("--peer-path", type=Path, help="a checkout of NVlabs/Fast-dLLM; without it only ours runs")
    add("--shape", choices=list(roofline.SHAPES), default="tiny", help="the network (tiny: width 256, 4 layers)")
    add("--vocab", type=int, help="vocabulary (the shape's)")
    add("--prompt", type=int, default=128, help="tokens of the prompt (128)")
    add("--gen", type=int, default=256, help="tokens generated (256)")
    add("--block", type=int, default=32, help="block length (32)")
    add("--steps", type=int, default=256, help="denoising steps (256)")
    add("--threshold", type=float, help="commit at this confidence instead of in `steps` equal shares")
    known = ["none", "prefix", "dual"]
    add("--caches", nargs="+", choices=known, default=known[1:], help="which (prefix dual)")
    add("--rounds", type=int, default=3, help="turns of each contender (3)")
    add("--threads", type=int, default=1, help="CPU threads (1)")
    add("--device", default="cpu", help="cpu or cuda")
    add("--batch", type=int, nargs="*", help="eight requests of mixed lengths together, against one by one; with "
        "--roofline how many requests at a time (1)")  # fmt: skip
    add("--graphs", choices=["on", "off", "both"], default="both", help="CUDA graphs in --roofline (both)")
    add("--sync-debug", choices=["warn", "error"], help="have torch tell where the host waits for the GPU")
    add("--roofline", action="store_true", help="one block step against the time its bytes need at copy bandwidth")
    add("--context", type=int, default=1024, help="positions in the cache for --roofline (1024)")
    add("--output", type=Path, help="the JSON file")
    return words.parse_args(argv)


def caches(lm: LM, options: argparse.Namespace) -> dict[str, Any]:
    """Each cache alone and, with a peer, its own code beside it."""
    prompt = roofline.prompt(lm, options.prompt)
    whole, blocks = len(prompt) + options.gen, options.gen // options.block
    numbers: dict[str, Any] = {"gen_length": options.gen, "block_length": options.block, "steps": options.steps}
    theirs: dict[str, Job] = {}
    if options.peer_path:
        theirs = fast_dllm.jobs(options.peer_path, lm, prompt, threshold=options.threshold, **numbers)
    if options.threshold is not None:
        numbers |= {"rule": "threshold", "threshold": options.threshold}
    jobs: dict[str, Job] = {}
    for cache in options.caches:  # those that are compared run one after the other
        jobs[f"ours {cache}"] = _ours(lm, [prompt], cache=cache, **numbers)
        if cache in theirs:
            jobs[f"theirs {cache}"] = theirs[cache]
        jobs[f"deterministic {cache}"] = _ours(lm, [prompt], cache=cache, deterministic=True, **numbers)
        jobs[f"modules {cache}"] = _ours(lm, [prompt], cache=cache, kernels="torch", **numbers)
    jobs["floor"] = lambda: bare.products(lm, options.block, FLOOR_FORWARDS)
    jobs["attention"] = lambda: bare.attention(lm, options.block, whole, FLOOR_FORWARDS)
    if "dual" in options.caches and options.threshold is None:
        jobs["bare dual"] = lambda: ([], bare.dual(lm, whole, options.block, blocks, options.steps))
    clocks, results = in_turns(jobs, options.rounds, options.device)
    times = clocks[_clock(options)]
    least = {name: 1e3 * min(times.pop(name)) / FLOOR_FORWARDS for name in ("floor", "attention")}
    rows: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        kind, cache = name.split()
        tokens, nfe = results[name]
        row = {"seconds": min(taken), "median": statistics.median(taken), "nfe": nfe}
        row["ms_a_forward"] = 1e3 * min(taken) / nfe
        if (other := f"theirs {cache}") in jobs and kind in ("ours", "bare", "modules"):
            row["of_theirs"] = _ratio(taken, times[other])
            if kind != "bare":
                row["same_tokens"] = tokens == results[other][0]
        if kind == "deterministic":
            row["of_ours"] = _ratio(taken, times[f"ours {cache}"])
        rows[name] = row
        print(f"{name:14s} {row}", flush=True)
    return {"rows": rows, **{f"{name}_ms_of_a_block_forward": value for name, value in least.items()}}


def batch(lm: LM, options: argparse.Namespace) -> dict[str, Any]:
    """Eight requests of mixed lengths: together, and one by one; beside them the matrix products of both, alone."""
    prompts = [roofline.prompt(lm, options.prompt // 2 + i * options.prompt // 8, seed=i) for i in range(8)]
    numbers = {"gen_length": options.gen, "block_length": options.block, "steps": options.steps, "cache": "dual"}
    later = options.steps // (options.gen // options.block) - 1  # forwards of a block after the one over everything
    lengths = [len(prompt) + options.gen for prompt in prompts]
    multiply = bare.by_ours() if binding.unavailable() is None else F.linear

    def products(wholes: list[int], rows: int, times: int) -> None:
        for whole in wholes:
            bare.products(lm, whole, 1, decided=rows, multiply=multiply)
        bare.products(lm, rows, later * times, multiply=multiply)

    jobs: dict[str, Job] = {
        "together": _ours(lm, prompts, **numbers),
        "one by one": lambda: [_ours(lm, [prompt], **numbers)() for prompt in prompts],
        "products together": lambda: products([sum(lengths)], 8 * options.block, 1),  # of one block
        "products one by one": lambda: products(lengths, options.block, 8),
    }
    clocks, results = in_turns(jobs, options.rounds, options.device)
    found: dict[str, Any] = {
        clock: {
            "seconds": {name: min(taken) for name, taken in times.items()},
            "gain": _ratio(times["one by one"], times["together"]),
            "gain_of_the_matrix_products": _ratio(times["products one by one"], times["products together"]),
        }
        for clock, times in clocks.items()
    }
    tokens = results["together"][0]
    alone = [token for one, _ in results["one by one"] for token in one]
    return {**found, "same_tokens": tokens == alone, "tokens": len(tokens)}


def _ratio(over: list[float], under: list[float]) -> dict[str, float]:
    """Of two jobs that took turns: the median of the rounds' ratios, how far they lie apart, and that of the best."""
    return {**spread(ratios(over, under)), "of_the_best": min(over) / min(under)}


def floors(lm: LM, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Block steps of each batch, recorded and launched, against their bytes and FLOPs."""
    modes = (
        {"on": [True], "off": [False], "both": [True, False]}[options.graphs] if options.device != "cpu" else [False]
    )
    found = []
    for size in options.batch or [1]:
        for graphs in modes:
            shape = {"batch": size, "context": options.context, "block": options.block, "graphs": graphs}
            found.append(roofline.block_steps(lm, **shape, device=options.device, clock=_clock(options)))
            print(json.dumps(found[-1]), flush=True)
            write(_file(options), {"machine": machine(options.device), "shape": options.shape, "steps": found})
    return found


def _file(options: argparse.Namespace) -> Path:
    kind = f"-{options.shape}" if options.roofline else "-batch" if options.batch is not None else ""
    return options.output or RESULTS / f"engine-{options.device}{kind}.json"


def _ours(lm: LM, prompts: list[list[int]], **settings: Any) -> Job:
    """A call that decodes them; it returns all tokens, and the number of forward passes."""

    def run() -> tuple[list[int], int]:
        results = dlm.generate(lm, prompts, **settings)
        return [token for result in results for token in result.tokens], sum(result.nfe for result in results)

    return run


def _clock(options: argparse.Namespace) -> str:
    """Which of them speaks of speed: on one CPU thread its own time, which others' work moves less."""
    return "cpu" if options.device == "cpu" and options.threads == 1 else "wall"


if __name__ == "__main__":
    raise SystemExit(main())
