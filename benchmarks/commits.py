"""Speed of two checkouts, taking turns in one run: `python benchmarks/commits.py OLD/.venv/bin/python [NEW/.venv/bin/python]`.

Each row is one way of decoding the same random model of width 256: the median over rounds of new CPU time by old CPU time,
with quartiles; the last line is the geometric mean. With --training it is one way of training a model of pico's first shape
(8,192 tokens, 4 layers of 256, 16 x 256 tokens a step, causal, Muon) instead: tokens a second of a step, the median, its share
of what the CPU's matrix products could do, and both of old fp32. Each interpreter imports the `dlm` that is installed for
it, and starts anew in each round: where its memory happens to lie makes a difference of a tenth.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import RESULTS, machine, parser, quartiles, shown, spread, write

BLOCK = {"gen_length": 256, "block_length": 32}
ONE = [list(range(128))]
EIGHT = [list(range(i, 24 + 9 * i)) for i in range(8)]
ROWS = {
    "none, 64 steps": ("llada", ONE, {**BLOCK, "steps": 64, "cache": "none"}),
    "prefix, 256 steps": ("llada", ONE, {**BLOCK, "steps": 256, "cache": "prefix"}),
    "dual, 256 steps": ("llada", ONE, {**BLOCK, "steps": 256, "cache": "dual"}),
    "dual, 64 steps": ("llada", ONE, {**BLOCK, "steps": 64, "cache": "dual"}),
    "dual, threshold 0.9": ("llada", ONE, {**BLOCK, "rule": "threshold", "threshold": 0.9, "cache": "dual"}),
    "dual, drawn": ("llada", ONE, {**BLOCK, "steps": 64, "temperature": 1.0, "seed": 1, "cache": "dual"}),
    "dual, guided": ("llada", ONE, {**BLOCK, "steps": 64, "cfg_scale": 1.0, "cache": "dual"}),
    "dual, multi_block": ("llada", ONE, {**BLOCK, "steps": 64, "strategy": "multi_block", "cache": "dual"}),
    "dual, eight together": ("llada", EIGHT, {**BLOCK, "gen_length": 64, "steps": 64, "cache": "dual"}),
    "exact, block-causal": ("sdar", ONE, {**BLOCK, "block_length": 4, "steps": 256}),
    "exact, causal, eight together": ("llama", EIGHT, {"gen_length": 64}),
    "dual, bf16": ("bf16", ONE, {**BLOCK, "steps": 64, "cache": "dual"}),
}
FAMILIES = {
    "llada": {"model_type": "llada"},
    "bf16": {"model_type": "llada"},
    "sdar": {"model_type": "sdar", "attention": "block_causal", "block_length": 4},
    "llama": {"model_type": "llama", "attention": "causal", "shifted_logits": True},
}


def work() -> None:
    """Decode the rows that are named on standard input, and print the CPU seconds of each."""
    import time

    import torch

    import dlm
    from dlm.models import LM, ModelConfig, Transformer

    torch.set_num_threads(1)
    models = {}
    for line in sys.stdin:
        family, prompts, settings = ROWS[line.strip()]
        if family not in models:
            config = ModelConfig(
                vocab_size=1024, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
                head_dim=64, intermediate_size=704, mask_token_id=1023, initializer_range=0.02, **FAMILIES[family],
            )  # fmt: skip
            network = Transformer(config)
            network.initialise(torch.Generator().manual_seed(0))
            network.to(torch.bfloat16 if family == "bf16" else torch.float32)
            models[family] = LM(network.eval(), None, family)
        started = time.process_time()
        tokens = [result.tokens for result in dlm.generate(models[family], prompts, **settings)]
        print(json.dumps([time.process_time() - started, sum(map(sum, tokens))]), flush=True)


def main() -> int:
    words = parser(__doc__)
    words.add_argument("old", help="the interpreter of one checkout")
    words.add_argument("new", nargs="?", default=sys.executable, help="and of the other; this one unless given")
    words.add_argument("--rounds", type=int, default=9)
    words.add_argument("--training", action="store_true", help="of training instead of decoding")
    words.add_argument("--steps", type=int, default=16, help="of each training in each round (16)")
    words.add_argument("--threads", type=int, default=1, help="of training (1)")
    words.add_argument("--output", type=Path, default=RESULTS / "commits-training.json", help="JSON of --training")
    options = words.parse_args()
    if options.training:
        compare_training(options)
        return 0
    ratios: dict[str, list[float]] = {row: [] for row in ROWS}
    sums: dict[str, set[int]] = {row: set() for row in ROWS}
    for number in range(options.rounds):
        workers = [
            subprocess.Popen([python, __file__, "--work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for python in (options.old, options.new)
        ]
        for row in ROWS:
            seconds = [0.0, 0.0]
            for which in (0, 1, 0, 1) if number % 2 else (1, 0, 1, 0):  # the first time warms up
                print(row, file=workers[which].stdin, flush=True)
                seconds[which], total = json.loads(workers[which].stdout.readline())
                sums[row].add(total)
            ratios[row].append(seconds[1] / seconds[0])
        for worker in workers:
            worker.communicate()
    medians = []
    for row, found in ratios.items():
        ratio = quartiles(found)
        medians.append(ratio["median"])
        print(f"{row:32} {shown(ratio, 3)}{'' if len(sums[row]) == 1 else '   OTHER TOKENS'}")
    print(f"{'geometric mean':32} {statistics.geometric_mean(medians):.3f}")
    return 0


TRAINING = """
[train]
batch_size = 16
length = 256
lr = 2.5e-3
warmup_steps = 5
device = "cpu"
[model]
hidden_size = 256
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
head_dim = 64
intermediate_size = 704
max_position_embeddings = 2048
tie_word_embeddings = true
[objective]
masking = "causal"
[data]
source = "stdlib"
[optim]
hidden = { algorithm = "muon", lr_scale = 2.0 }
[eval]
every = 0
sequences = 0
[checkpoint]
every = 0
[log]
every = 1
progress = false
"""
WAYS = {"fp32": [], "fp32, compiled": ["--train.compile"], "bf16": ["--train.precision", "bf16"]}
WAYS["bf16, compiled"] = WAYS["fp32, compiled"] + WAYS["bf16"]
WARMUP = 6  # steps in which compilation falls, and the clock of processors rises


def compare_training(options: argparse.Namespace) -> None:
    """Train with both checkouts in turns, in each way; print and write the speeds."""
    pythons = {"old": options.old, "new": options.new}
    found: dict[str, list[dict[str, float]]] = {f"{side}, {way}": [] for side in pythons for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="dlm-commits-") as scratch:
        tokenizer = f"{scratch}/tokenizer"
        learn = [options.new, "-P", "-m", "dlm.cli.tokenizer", "--output", tokenizer, "--vocab_size", "8192"]
        subprocess.run([*learn, "--data.source", "stdlib"], check=True, capture_output=True)
        config = Path(scratch) / "training.toml"
        config.write_text(TRAINING, "utf-8")
        shared = ["--config", str(config), "--train.tokenizer", tokenizer, "--train.threads", str(options.threads)]
        for number in range(options.rounds):
            for name in list(found)[:: -1 if number % 2 else 1]:
                side, _, way = name.partition(", ")
                run = [pythons[side], "-P", "-m", "dlm.cli.train", *shared, *WAYS[way]]
                found[name].append(training_speed(run, options.steps, Path(scratch) / f"{len(found[name])} {name}"))
                print(f"round {number + 1}, {name}: {found[name][-1]['tokens_per_second']:,.0f} tokens/s", flush=True)
    rows: dict[str, dict[str, Any]] = {}
    for name, rounds in found.items():
        columns = {column: [row[column] for row in rounds] for column in rounds[0]}
        rows[name] = {column: spread(values) for column, values in columns.items()}
        pairs = zip(columns["tokens_per_second"], found["old, fp32"], strict=True)
        rows[name]["of old, fp32"] = spread([speed / old["tokens_per_second"] for speed, old in pairs])
        print(f"{name:22} " + ", ".join(f"{column} {shown(values)}" for column, values in rows[name].items()))
    write(options.output, {"machine": machine(), "threads": options.threads, "rounds": found, "results": rows})


def training_speed(command: list[str], steps: int, out: Path) -> dict[str, float]:
    """The median tokens/s of a training's steps after the first, and their share of the CPU's matrix products."""
    total = WARMUP + steps
    done = subprocess.run(
        [*command, "--train.out", str(out), "--train.steps", str(total)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    rows = [row for row in rows if row.get("step", 0) > WARMUP and "tokens_per_second" in row]
    return {column: statistics.median(row[column] for row in rows) for column in ("tokens_per_second", "mfu")}


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    else:
        raise SystemExit(main())
