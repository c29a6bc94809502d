"""How fast training is, beside the MDLM trainer of the `dllm` package: measure, print a table, write JSON.

    python benchmarks/train.py                                            # ours alone
    python benchmarks/train.py --peer-path ../dllm --peer-python ../dllm/.venv/bin/python
    python benchmarks/train.py --threads 1 --steps 30 --rounds 5 --only ours-adamw-compiled theirs-compiled --peer-path ../dllm

Every contender trains the same shape from scratch on the same token sequences with the same batch, length, precision and
thread count, each time in a process of its own, and rounds go through all of them, so that ratios are taken under the
same load. Theirs runs as its own `examples/a2d/mdlm/pt.py` does; saving and evaluation are off in both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contenders import CONTENDERS, DATA
from measuring import RESULTS, parser, shown, spread, write

if TYPE_CHECKING:
    from dlm.data.tokenizer import Tokenizer
SHAPES = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "ffn": 192, "vocab": 1024, "length": 64, "batch": 4},
    "small": {"layers": 4, "width": 256, "heads": 4, "ffn": 704, "vocab": 8192, "length": 256, "batch": 8},
    "medium": {"layers": 8, "width": 512, "heads": 8, "ffn": 1408, "vocab": 16384, "length": 512, "batch": 8},
    "large": {"layers": 28, "width": 2048, "heads": 16, "ffn": 6144, "vocab": 65536, "length": 1024, "batch": 8},
}
PAIRS = {"theirs": "eager", "theirs-compiled": "compiled"}  # what a speed is divided by, and the column's name


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    with tempfile.TemporaryDirectory(prefix="dlm-train-benchmark-") as scratch:
        plan = _plan(options, Path(scratch))
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(options.rounds):
            rounds.append({name: _outside(name, plan, options) for name in ("ceiling", *options.only)})
            speeds = "  ".join(f"{name} {_speed(rounds[-1][name], plan):,.0f}" for name in options.only)
            print(f"round {number + 1}/{options.rounds}, tokens/s: {speeds}", flush=True)
    from dlm.evaluation.card import machine

    versions = {name: rounds[0][name].pop("versions") for name in rounds[0]}
    report = {"machine": machine(), **plan["facts"], "versions": versions, "results": summarise(rounds, plan)}
    print("\n" + table(report) + "\n")
    write(options.output, {**report, "rounds": rounds})
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    add = words.add_argument
    add("--peer-path", type=Path, help="a checkout of ZHZisZZ/dllm; without it only ours runs")
    add("--peer-python", default=sys.executable, help="interpreter with their dependencies (this one)")
    add("--only", nargs="+", choices=list(CONTENDERS), help="contenders (all)")
    add("--shape", choices=list(SHAPES), default="small", help="shape of network and batch (small)")
    add("--qk-norm", action="store_true", help="norms on queries and keys: their Qwen3 class, not their Llama class")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast in both (fp32)")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads (all)")
    add("--steps", type=int, default=20, help="timed optimiser steps a round (20)")
    add("--warmup", type=int, default=5, help="untimed steps before them; compilation falls in there (5)")
    add("--rounds", type=int, default=5, help="processes of each contender (5)")
    add("--output", type=Path, default=RESULTS / "train.json", help="the JSON file")
    options = words.parse_args(argv)
    if options.peer_path and not (options.peer_path / "dllm" / "core" / "trainers" / "mdlm.py").is_file():
        words.error(f"--peer-path {options.peer_path} is no checkout of dllm: dllm/core/trainers/mdlm.py is not there")
    if min(options.threads, options.steps, options.warmup, options.rounds) < 1:
        words.error("--threads, --steps, --warmup and --rounds are at least 1")
    possible = [name for name in CONTENDERS if options.peer_path or not name.startswith("theirs")]
    unknown = set(options.only or ()) - set(possible)
    if unknown:
        words.error(f"--only {' '.join(sorted(unknown))}: needs --peer-path")
    options.only = options.only or possible
    return options


def _plan(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Everything a contender needs, written to a file: our config, the token sequences, their shape."""
    os.environ["DLM_CACHE"] = str(scratch / "cache")  # the user's cache is neither read nor written
    import numpy as np

    from dlm.data import DataConfig, build_stream

    s = SHAPES[options.shape]
    print("tokenising the standard library", flush=True)
    tokenizer = tokenizer_of(s["vocab"], scratch / "tokenizer")
    steps = options.warmup + options.steps
    stream = build_stream(DataConfig(**DATA), tokenizer, s["length"], "train", 0)
    np.save(scratch / "tokens.npy", np.stack([next(stream)["input_ids"] for _ in range(steps * s["batch"])]))
    model = network_of(s) | {"rms_norm_eps": 1e-6}
    facts = {key: getattr(options, key) for key in ("shape", "precision", "qk_norm", "threads", "steps", "warmup")}
    plan = {"scratch": str(scratch), "model": model, "facts": {**facts, **s}}
    (scratch / "plan.json").write_text(json.dumps(plan), "utf-8")
    return plan


def tokenizer_of(vocab_size: int, folder: Path) -> "Tokenizer":
    """A tokenizer of this size, of the standard library, written into `folder`."""
    from dlm.data import DataConfig, TokenizerConfig, train_tokenizer

    data = DataConfig(**DATA)
    return train_tokenizer(TokenizerConfig(output=str(folder), vocab_size=vocab_size, max_documents=400, data=data))


def network_of(shape: dict[str, int]) -> dict[str, Any]:
    """A line of SHAPES as [model]."""
    return {
        "vocab_size": shape["vocab"],
        "hidden_size": shape["width"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["heads"],
        "head_dim": shape["width"] // shape["heads"],
        "intermediate_size": shape["ffn"],
        "tie_word_embeddings": True,
    }


def _outside(name: str, plan: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One contender in its own process; what it measured."""
    theirs = name.startswith("theirs")
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    root = options.peer_path.resolve() if theirs else Path(__file__).resolve().parents[1]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    script, file = Path(__file__).with_name("contenders.py").resolve(), Path(plan["scratch"]) / "plan.json"
    command = [options.peer_python if theirs else sys.executable, str(script), name, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=plan["scratch"])
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summarise(rounds: list[dict[str, dict[str, Any]]], plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each contender the median over rounds, with smallest and largest; ratios are taken within a round."""
    found = [result for results in rounds for result in results.values()]
    sizes = {result["parameters"] for result in found if "parameters" in result}
    if len(sizes) != 1:
        raise SystemExit(f"the contenders' networks differ in size: {sorted(sizes)} parameters")
    flops = next(result["flops_a_token"] for result in found if "flops_a_token" in result)
    ceilings = [results["ceiling"]["flops"] for results in rounds]
    summary: dict[str, dict[str, Any]] = {"ceiling": {"gflops": spread([ceiling / 1e9 for ceiling in ceilings])}}
    for name in list(rounds[0])[1:]:
        own = [results[name] for results in rounds]
        speeds = [_speed(result, plan) for result in own]
        summary[name] = {
            "tokens_per_second": spread(speeds),
            "mfu": spread([speed * flops / ceiling for speed, ceiling in zip(speeds, ceilings, strict=True)]),
            "cpu_seconds_a_step": spread([statistics.median(result["cpu_seconds"]) for result in own]),
            "peak_rss_mib": spread([result["peak_rss"] / 2**20 for result in own]),
            "loss": own[-1]["loss"],
        }
        for peer in set(PAIRS) & set(rounds[0]):
            theirs = [_speed(results[peer], plan) for results in rounds]
            summary[name][f"times_{peer}"] = spread([a / b for a, b in zip(speeds, theirs, strict=True)])
    return summary


def _speed(result: dict[str, Any], plan: dict[str, Any]) -> float:
    """Tokens a second by the median step, which another process's burst does not move."""
    return plan["facts"]["batch"] * plan["facts"]["length"] / statistics.median(result["seconds"])


def table(report: dict[str, Any]) -> str:
    from dlm.evaluation.table import markdown

    results = report["results"]
    peers = [peer for peer in PAIRS if peer in results]
    rows = []
    for name in list(results)[1:]:
        r = results[name]
        row = {"": name, "tokens/s": "{median:,.0f}".format(**r["tokens_per_second"])}
        row |= {"low–high": "{low:,.0f}–{high:,.0f}".format(**r["tokens_per_second"])}
        row |= {"MFU": f"{r['mfu']['median']:.1%}", "peak RSS": f"{r['peak_rss_mib']['median']:,.0f} MiB"}
        row |= {"CPU s/step": f"{r['cpu_seconds_a_step']['median']:.3f}", "loss": f"{r['loss']:.3f}"}
        rows.append(row | {f"× theirs, {PAIRS[peer]}": shown(r[f"times_{peer}"]) for peer in peers})
    shape = "{layers} layers, width {width}, {heads} heads, feed-forward {ffn}, vocabulary {vocab}, batch {batch} × {length}"
    ceiling = f"GEMM ceiling {results['ceiling']['gflops']['median']:,.0f} GFLOP/s"
    facts = f"{shape.format(**report)}; {report['precision']}, {report['threads']} threads, {ceiling}"
    return f"{facts}\n\n{markdown(rows)}"


if __name__ == "__main__":
    raise SystemExit(main())
