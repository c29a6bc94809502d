"""What a draft learns from: its target's own answers against raw text, the target's states against none; and DFlash 2.

    python benchmarks/draft_data.py [--seeds 0 1 2] [--steps 150]

needs steps 1 to 3 of configs/dflash/ (tokenizer, target, responses) in runs/dflash/. Trains a draft for each row and seed
with the same steps, batches and shape, then decodes the same held-out beginnings of the standard library greedily with
each: tau is the mean over all verifications.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import dlm
from dlm.config import load
from dlm.data.config import DataConfig
from dlm.data.source import build_stream
from dlm.training.config import TrainConfig
from dlm.training.loop import train

ROOT = Path(__file__).parent.parent
RAW = {"data.source": "stdlib", "data.paths": "[]", "data.heldout_fraction": "0.02"}
ROWS: dict[str, dict[str, str]] = {
    "regenerated": {},
    "raw text": RAW,
    "regenerated, no context": {"draft.context": "false"},
    "regenerated, DFlash 2": {
        "draft.conv_kernel_size": "2",
        "draft.conv_group_size": "8",
        "draft.selector_rank": "16",
        "draft.selector_top_k": "8",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--runs", default="runs/dflash")
    args = parser.parse_args()
    target = dlm.load(f"{args.runs}/target", device="cpu")
    stream = build_stream(DataConfig(source="stdlib"), target.tokenizer, 64, "heldout", 0)
    prompts = [sample["input_ids"].tolist() for sample in islice(stream, args.prompts)]
    found: dict[str, list[float]] = {}
    for seed in args.seeds:
        for name, own in ROWS.items():
            options = {"train.out": f"{args.runs}/{name.replace(', ', '-').replace(' ', '-')}-{seed}"}
            options |= {"train.seed": str(seed), "train.steps": str(args.steps), "train.device": "cpu"}
            options |= {"eval.sequences": "0", "checkpoint.every": "0", "log.progress": "false"}
            result = train(load(TrainConfig, [ROOT / "configs" / "dflash" / "draft.toml"], options | own))
            draft = dlm.load_draft(result.folder, target)
            written = dlm.generate(target, prompts, draft=draft, gen_length=64)
            counts = [count for one in written for count in one.accepted or []]
            found.setdefault(name, []).append(sum(counts) / len(counts))
            print(f"seed {seed}  {name:24}  tau {found[name][-1]:.3f}", flush=True)
    print(json.dumps({"steps": args.steps, "prompts": args.prompts, "tau": found}))


if __name__ == "__main__":
    main()
