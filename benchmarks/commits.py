"""Decoding speed of two checkouts, taking turns in one run: `python benchmarks/commits.py OLD/.venv/bin/python [NEW/.venv/bin/python]`.

Each row is one way of decoding the same random model of width 256: the median over rounds of new CPU time by old CPU time,
with quartiles; the last line is the geometric mean. Each interpreter imports the `dlm` that is installed for it, and starts
anew in each round: where its memory happens to lie makes a difference of a tenth.
"""

import json
import statistics
import subprocess
import sys

from measuring import parser, quartiles, shown

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
    options = words.parse_args()
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


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    else:
        raise SystemExit(main())
