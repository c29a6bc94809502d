"""Which recipe learns most from the same arithmetic: small runs of `dlm-train`, all with one budget of FLOPs.

    python benchmarks/recipe.py OUT [--only NAME ...] [--flops 2e13] [--threads 1]

Each line of RECIPES is a TOML over BASE. A run takes as many steps as its budget buys at its own FLOPs a token, so a
smaller vocabulary or a shallower network gets more steps. What counts is the likelihood of the held-out files in bits a
byte, which compares across tokenizers; CPU seconds stand beside it. Finished runs in OUT are not run again. Tokenizers are
learned from the training split when first needed. A run of another stage starts from `init_from`, a finished model.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm.training.config import TrainConfig

DATA = {"source": "stdlib"}
BASE: dict[str, Any] = {"vocab": 8192, "layers": 4, "width": 256, "ffn": 704, "batch": 16, "length": 256, "lr": 2.5e-3}
BASE |= {"qk_norm": False, "seed": 0, "masking": "causal", "decay": 0.3, "optim": {}, "muon": 2.0}
CHOSEN = {"vocab": 4096, "layers": 5, "qk_norm": True}
RECIPES: dict[str, dict[str, Any]] = {
    "today": {},
    "vocabulary 4k": {"vocab": 4096},
    "vocabulary 2k": {"vocab": 2048},
    "4k, 5 layers": {"vocab": 4096, "layers": 5},
    "norms of q and k: 4k, 5 layers": CHOSEN,
    "the same, seed 1": CHOSEN | {"seed": 1},
    "norms of q and k: 8k, 4 layers": {"qk_norm": True},
    "norms of q and k: 2k, 6 layers": CHOSEN | {"vocab": 2048, "layers": 6},
    "chosen, 8 layers of 192": CHOSEN | {"layers": 8, "width": 192, "ffn": 512},
    "chosen, 3 layers of 320": CHOSEN | {"layers": 3, "width": 320, "ffn": 896},
    "chosen, batch 8": CHOSEN | {"batch": 8},
    "chosen, batch 32": CHOSEN | {"batch": 32},
    "chosen, 32 of 128": CHOSEN | {"batch": 32, "length": 128},
    "chosen, 8 of 512": CHOSEN | {"batch": 8, "length": 512},
    "chosen, lr halved": CHOSEN | {"lr": 1.25e-3},
    "chosen, lr doubled": CHOSEN | {"lr": 5e-3},
    "chosen, Muon's lr doubled": CHOSEN | {"muon": 4.0},
    "chosen, AdamW": CHOSEN | {"muon": 0.0},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs, their tokenizers and results.json")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    parser.add_argument("--flops", type=float, default=2e13, help="training arithmetic of each run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("\n" + json.dumps(outcome(options.one, options)))
        return 0
    for name in options.only:
        result = options.out / slug(name) / "result.json"
        if not result.exists():
            command = [sys.executable, __file__, str(options.out), "--one", name]
            command += ["--flops", str(options.flops), "--threads", str(options.threads)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            result.write_text(done.stdout.splitlines()[-1] + "\n")
        print(f"{name}: {json.loads(result.read_text())['bits_per_byte']:.3f} bits a byte", flush=True)
    found = [json.loads(p.read_text()) for p in sorted(options.out.glob("*/result.json"))]
    (options.out / "recipe.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "recipe.md").write_text(table(found))
    return 0


def slug(name: str) -> str:
    """A recipe's name with a hyphen for all that is no letter or digit, so that it can name a folder."""
    return "".join(c if c.isalnum() else "-" for c in name)


def outcome(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one recipe on its budget; what it reached."""
    from dlm.training.config import TrainConfig
    from dlm.training.loop import train as trained
    from dlm.training.run import Run

    recipe = BASE | RECIPES[name]
    out = options.out / slug(name)
    section = {"out": str(out), "tokenizer": tokenizer(recipe["vocab"], options.out), "device": "cpu"}
    section |= {"batch_size": recipe["batch"], "length": recipe["length"], "lr": recipe["lr"], "seed": recipe["seed"]}
    section |= {"threads": options.threads, "schedule": "wsd"}
    heads = recipe["width"] // 64
    model = {"hidden_size": recipe["width"], "num_hidden_layers": recipe["layers"], "num_attention_heads": heads}
    model |= {"num_key_value_heads": heads, "head_dim": 64, "intermediate_size": recipe["ffn"]}
    model |= {"tie_word_embeddings": True, "qk_norm": recipe["qk_norm"], "max_position_embeddings": 2048}
    optim = (
        {"hidden": {"algorithm": "muon", "lr_scale": recipe["muon"], "weight_decay": 0.01}} if recipe["muon"] else {}
    )
    sections = {"model": model, "data": DATA, "objective": {"masking": recipe["masking"]}, "optim": optim}
    sections |= {"eval": {"every": 0, "sequences": 64}, "checkpoint": {"every": 0}, "log": {"progress": False}}

    def config(steps: int) -> "TrainConfig":
        steps_of = {"steps": steps, "decay_steps": max(1, int(steps * recipe["decay"])), "warmup_steps": steps // 20}
        return TrainConfig.model_validate({"train": section | steps_of, **sections})

    probe = Run(config(100))
    tokens_a_step = recipe["batch"] * recipe["length"]
    steps = int(options.flops / (probe.flops_a_token * tokens_a_step))
    parameters, flops_a_token = probe.parameters, probe.flops_a_token
    del probe
    wall, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    result = trained(config(steps))
    assert result.bits_per_byte is not None
    return {
        "name": name,
        **recipe,
        "parameters": parameters,
        "flops_a_token": flops_a_token,
        "steps": steps,
        "tokens": steps * tokens_a_step,
        "bits_per_byte": result.bits_per_byte[0],
        "cpu_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu,
        "wall_seconds": time.perf_counter() - wall,
    }


def tokenizer(vocab_size: int, folder: Path) -> str:
    """The folder of the tokenizer of this size, learned from the training split if it is not there yet."""
    from dlm.data.config import DataConfig, TokenizerConfig
    from dlm.data.tokenizer_training import train_tokenizer

    out = folder / f"tokenizer-{vocab_size}"
    if not (out / "tokenizer.json").exists():
        train_tokenizer(TokenizerConfig(output=str(out), vocab_size=vocab_size, data=DataConfig.model_validate(DATA)))
    return str(out)


def table(found: list[dict[str, Any]]) -> str:
    """The results as Markdown, best first."""
    lines = ["| recipe | parameters | tokens | bits a byte | CPU s |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {r['name']} | {r['parameters'] / 1e6:.2f} M | {r['tokens'] / 1e6:.2f} M | {r['bits_per_byte']:.3f} "
        f"| {r['cpu_seconds']:,.0f} |"
        for r in sorted(found, key=lambda r: r["bits_per_byte"])
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
