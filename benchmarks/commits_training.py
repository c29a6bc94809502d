"""Training speed of two checkouts, in turns: `python benchmarks/commits_training.py OLD/.venv/bin/python [NEW/.venv/bin/python]`.

Each row is one way of training a model of pico's first shape (8,192 tokens, 4 layers of 256, 16 x 256 tokens a step, causal,
Muon): tokens a second, their share of what the CPU's matrix products could do (mfu), and the ratio to the old checkout's fp32
in the same round; medians, with least and most. Each interpreter imports the `dlm` that is installed for it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import RESULTS, machine, parser, ratios, shown, spread, write

Speed = dict[str, float]
"""Of one training: tokens_per_second and mfu."""

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
WARMUP = 6
"""Steps before those that count: compilation falls in there."""


def main() -> int:
    words = parser(__doc__)
    words.add_argument("old", help="the interpreter of one checkout")
    words.add_argument("new", nargs="?", default=sys.executable, help="and of the other; this one unless given")
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--steps", type=int, default=8, help="of each training in each round (8)")
    words.add_argument("--threads", type=int, default=1)
    words.add_argument("--output", type=Path, default=RESULTS / "commits-training.json", help="the JSON file")
    options = words.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlm-commits-") as scratch:
        rounds = measured(options, Path(scratch))
    results = summary(rounds)
    for name, row in results.items():
        print(f"{name:22} " + ", ".join(f"{column} {shown(values)}" for column, values in row.items()))
    write(options.output, {"machine": machine(), "threads": options.threads, "rounds": rounds, "results": results})
    return 0


def measured(options: argparse.Namespace, scratch: Path) -> dict[str, list[Speed]]:
    """For each checkout and way the speed in every round; the order is reversed from round to round."""
    pythons = {"old": options.old, "new": options.new}
    found: dict[str, list[Speed]] = {f"{side}, {way}": [] for side in pythons for way in WAYS}
    # -P: else the folder that this is started in would come before the interpreter's own `dlm`.
    learn = [options.new, "-P", "-m", "dlm.cli.tokenizer", "--output", str(scratch / "tokenizer")]
    subprocess.run([*learn, "--vocab_size", "8192", "--data.source", "stdlib"], check=True, capture_output=True)
    (scratch / "training.toml").write_text(TRAINING, "utf-8")
    shared = ["-P", "-m", "dlm.cli.train", "--config", str(scratch / "training.toml")]
    shared += ["--train.tokenizer", str(scratch / "tokenizer"), "--train.threads", str(options.threads)]
    for number in range(options.rounds):
        for name in list(found)[:: -1 if number % 2 else 1]:
            side, _, way = name.partition(", ")
            speed = training_speed([pythons[side], *shared, *WAYS[way]], options.steps, scratch / f"{number} {name}")
            found[name].append(speed)
            print(f"round {number + 1}, {name}: {speed['tokens_per_second']:,.0f} tokens/s", flush=True)
    return found


def summary(rounds: dict[str, list[Speed]]) -> dict[str, dict[str, Any]]:
    """Each row's median, least and most; ratios are taken within rounds."""
    base = [speed["tokens_per_second"] for speed in rounds["old, fp32"]]
    rows: dict[str, dict[str, Any]] = {}
    for name, speeds in rounds.items():
        columns = {column: [speed[column] for speed in speeds] for column in ("tokens_per_second", "mfu")}
        columns["of old, fp32"] = ratios(columns["tokens_per_second"], base)
        rows[name] = {column: spread(values) for column, values in columns.items()}
    return rows


def training_speed(command: list[str], steps: int, out: Path) -> Speed:
    """The median over a training's steps after the first `WARMUP`."""
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
    raise SystemExit(main())
