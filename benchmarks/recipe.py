"""Which recipe learns most from the same arithmetic: small runs of `dlm-train`, all with one budget of FLOPs.

    python benchmarks/recipe.py OUT [--only NAME ...] [--seeds 1] [--flops 2e13] [--threads 1] [--precision bf16]

PRETRAINING has autoregressive models from scratch, CONVERSIONS what is made of the bundled `pico-causal`. A row is a TOML's
settings over its table's first; it takes as many steps as the budget buys at its own FLOPs a token, so a smaller vocabulary
gets more steps, and block diffusion, which reads every text twice, gets half of them. What counts is bits a byte of the
held-out files, all of them in windows of 256 tokens, which compares across tokenizers (of a smaller vocabulary a window has less
text) and seeds; and for models that see both sides the held-out lines they fill in. Finished runs in OUT are not run again.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import parser

from dlm.atomic import write_text
from dlm.evaluation.card import machine
from dlm.evaluation.rate import Rate

if TYPE_CHECKING:
    from dlm.training.config import TrainConfig

Row = dict[str, Any]
"""Settings of `dlm-train`, and four of our own: `vocabulary`, `start` (a row, or a model), `share` of the budget, `decay`."""

PACKAGES: Row = {"data.site_packages": True, "data.site_packages_max_bytes": 100_000}
PACKAGES |= {"data.site_packages_skip": ["beartype", "torch", "transformers", "sympy", "dlm"]}
BASELINE: Row = {"vocabulary": 8192, "decay": 0.3, "train.lr": 2.5e-3, "train.batch_size": 16, "train.length": 256}
BASELINE |= {
    "model.num_hidden_layers": 4,
    "model.hidden_size": 256,
    "model.intermediate_size": 704,
    "model.qk_norm": False,
}
BASELINE |= {"model.head_dim": 64, "model.num_attention_heads": 4, "model.num_key_value_heads": 4}
BASELINE |= {"model.tie_word_embeddings": True, "model.max_position_embeddings": 2048, "objective.masking": "causal"}
BASELINE |= {"optim.hidden": {"algorithm": "muon", "lr_scale": 2.0, "weight_decay": 0.01}, "data.source": "stdlib"}
CHOSEN: Row = {"vocabulary": 4096, "model.num_hidden_layers": 5, "model.qk_norm": True}
HEADS_OF_192: Row = {"model.num_attention_heads": 3, "model.num_key_value_heads": 3}
HEADS_OF_320: Row = {"model.num_attention_heads": 5, "model.num_key_value_heads": 5}
PRETRAINING: dict[str, Row] = {
    "baseline: 8k, 4 layers": {},
    "vocabulary 4k": {"vocabulary": 4096},
    "vocabulary 2k": {"vocabulary": 2048},
    "vocabulary 1k": {"vocabulary": 1024},
    "4k, 5 layers": {"vocabulary": 4096, "model.num_hidden_layers": 5},
    "chosen: 4k, 5 layers, norms of q and k": CHOSEN,
    "norms of q and k, 8k, 4 layers": {"model.qk_norm": True},
    "norms of q and k, 2k, 6 layers": CHOSEN | {"vocabulary": 2048, "model.num_hidden_layers": 6},
    "chosen, 8 layers of 192": CHOSEN
    | {"model.num_hidden_layers": 8, "model.hidden_size": 192, "model.intermediate_size": 512}
    | HEADS_OF_192,
    "chosen, 3 layers of 320": CHOSEN
    | {"model.num_hidden_layers": 3, "model.hidden_size": 320, "model.intermediate_size": 896}
    | HEADS_OF_320,
    "chosen, batch 8": CHOSEN | {"train.batch_size": 8},
    "chosen, batch 32": CHOSEN | {"train.batch_size": 32},
    "chosen, 32 of 128": CHOSEN | {"train.batch_size": 32, "train.length": 128},
    "chosen, 8 of 512": CHOSEN | {"train.batch_size": 8, "train.length": 512},
    "chosen, lr halved": CHOSEN | {"train.lr": 1.25e-3},
    "chosen, lr doubled": CHOSEN | {"train.lr": 5e-3},
    "chosen, Muon's lr doubled": CHOSEN
    | {"optim.hidden": {"algorithm": "muon", "lr_scale": 4.0, "weight_decay": 0.01}},
    "chosen, AdamW": CHOSEN | {"optim.hidden": {}},
    "chosen, documents apart": CHOSEN | {"objective.documents": "apart"},
    "chosen, packages too": CHOSEN | PACKAGES,
    "chosen, packages too, half of each file new": CHOSEN | PACKAGES | {"data.site_packages_fresh": 0.5},
    "half the budget: packages too": CHOSEN | PACKAGES | {"data.site_packages_fresh": 0.5, "share": 0.5, "decay": 0.0},
    "then the other half: the standard library alone": CHOSEN
    | {"start": "half the budget: packages too", "share": 0.5, "decay": 0.6},
}
RANDOM: Row = {"start": "pico-causal", "decay": 0.6, "train.lr": 1.2e-3, "train.batch_size": 16, "train.length": 256}
RANDOM |= {"optim.hidden": {"algorithm": "muon", "lr_scale": 2.0, "weight_decay": 0.1}, "data.source": "stdlib"}
RANDOM |= {"objective.masking": "random"}
CONVERSIONS: dict[str, Row] = {
    "random masking": {},
    "complementary masks": {"objective.masking": "complementary"},
    "spans": {"objective.masking": "spans", "objective.span_share": 0.85, "objective.span_edges": 0.5},
    "noise from 0.2 to 0.8": {"objective.t_min": 0.2, "objective.t_max": 0.8},
    "all noise levels count alike": {"objective.weighting": "uniform"},
    "aligned, all layers": {"align.weight": 3.0, "align.decay": "cosine"},
    "block diffusion, blocks of 4": {"objective.masking": "block", "objective.block_length": 4},
    "block diffusion, blocks of 8": {"objective.masking": "block", "objective.block_length": 8},
    "block diffusion, blocks of 16": {"objective.masking": "block", "objective.block_length": 16},
    "half the budget: random masking": {"share": 0.5},
    "then the other half: trajectories": {
        "start": "half the budget: random masking",
        "share": 0.5,
        "objective.masking": "trajectory",
        "objective.block_length": 16,
        "objective.max_block_length": 32,
        "objective.complementary": True,
    },
    "from scratch": {"start": "", "train.lr": 2.5e-3}
    | {k: v for k, v in (BASELINE | CHOSEN).items() if k[:5] == "model"},
}
RECIPES = {name: BASELINE | row for name, row in PRETRAINING.items()}
RECIPES |= {name: RANDOM | row for name, row in CONVERSIONS.items()}
TEACHER = 4 / 3
"""What alignment makes of a step's FLOPs: its teacher's forward, to three of forward and backward."""
LINES = 200


def main() -> int:
    words = parser(__doc__)
    words.add_argument("out", type=Path, help="folder of the runs, their tokenizers, recipe.json and recipe.md")
    words.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    words.add_argument("--seeds", type=int, default=1, help="runs of each row, with seeds from 0 (1)")
    words.add_argument("--flops", type=float, default=2e13, help="training arithmetic of each run (2e13)")
    words.add_argument("--threads", type=int, default=1)
    words.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 where the CPU has its units (fp32)"
    )
    words.add_argument("--gather", action="store_true", help="run nothing; only write what is finished down")
    words.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.one:
        name, seed = options.one
        run(name, int(seed), options)
        return 0
    for seed in range(0 if options.gather else options.seeds):
        for name in options.only:
            finished(name, seed, options)
    found = [json.loads(file.read_text("utf-8")) for file in sorted(options.out.glob("*/result.json"))]
    text = written(found)
    write_text(options.out / "recipe.json", json.dumps(found, indent=1) + "\n")
    write_text(options.out / "recipe.md", text)
    print(text)
    return 0


def finished(name: str, seed: int, options: argparse.Namespace) -> Path:
    """The folder of a row's finished run, after running it, and what it starts from, where that is still to be done."""
    folder = options.out / f"{slug(name)}-{seed}"
    if not (folder / "result.json").exists():
        if RECIPES[name].get("start") in RECIPES:
            finished(RECIPES[name]["start"], seed, options)
        command = [sys.executable, __file__, str(options.out), "--one", name, str(seed)]
        command += ["--flops", str(options.flops), "--threads", str(options.threads), "--precision", options.precision]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}, seed {seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        bits = json.loads((folder / "result.json").read_text("utf-8"))["bits_per_byte"]
        print(f"{name}, seed {seed}: {bits:.3f} bits a byte", flush=True)
    return folder


def slug(name: str) -> str:
    """A row's name with a hyphen for all that is no letter or digit, so that it can name a folder."""
    return "".join(c if c.isalnum() else "-" for c in name)


def run(name: str, seed: int, options: argparse.Namespace) -> None:
    """Train one row on its budget, unless its folder has the weights already, and score it."""
    import torch

    torch.set_num_threads(options.threads)
    folder = options.out / f"{slug(name)}-{seed}"
    if not (folder / "training.json").exists():
        write_text(folder / "training.json", json.dumps(trained(name, seed, folder, options)))
    result = {"name": name, "seed": seed, "settings": RECIPES[name], "precision": options.precision}
    result |= {"machine": machine()}
    result |= json.loads((folder / "training.json").read_text("utf-8")) | scored(folder, options)
    write_text(folder / "result.json", json.dumps(result) + "\n")


def trained(name: str, seed: int, folder: Path, options: argparse.Namespace) -> Row:
    """What the training took."""
    from dlm.training.loop import train
    from dlm.training.run import Run

    row = RECIPES[name]
    own = {key: row.get(key) for key in ("vocabulary", "start", "share", "decay")}
    fixed: Row = {"train.out": str(folder), "train.seed": seed, "train.threads": options.threads, "train.device": "cpu"}
    fixed |= {
        "train.precision": options.precision,
        "train.schedule": "wsd",
        "eval.every": 0,
        "eval.sequences": 0,
        "checkpoint.every": 0,
        "log.progress": False,
    }
    if own["start"]:
        start = finished(own["start"], seed, options) if own["start"] in RECIPES else own["start"]
        fixed |= {"train.init_from": str(start)}
        row = {key: value for key, value in row.items() if not key.startswith("model.")}
    else:
        fixed |= {"train.tokenizer": tokenizer(own["vocabulary"], options.out) if own["vocabulary"] else "pico-causal"}
    if row["objective.masking"] == "trajectory":
        fixed |= {"data.source": "traces", "data.paths": traces(start, folder), "data.pack": "row", "train.length": 128}
    steps = 100
    probe = Run(config(row | fixed, steps, 0.3))
    flops, parameters = probe.flops_a_token * (TEACHER if "align.weight" in row else 1), probe.parameters
    del probe
    tokens = row["train.batch_size"] * (fixed | row)["train.length"]
    steps = int(options.flops * (own["share"] or 1) / (flops * tokens))
    train(config(row | fixed, steps, own["decay"]))
    cpu = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    return {
        "parameters": parameters,
        "flops_a_token": flops,
        "steps": steps,
        "tokens": steps * tokens,
        "cpu_seconds": cpu,
    }


def config(settings: Row, steps: int, decay: float) -> "TrainConfig":
    """Of dotted settings, those of the schedule added."""
    from dlm.training.config import TrainConfig

    settings = settings | {"train.steps": steps, "train.warmup_steps": steps // 20}
    settings |= {"train.decay_steps": max(1, int(steps * decay))}
    sections: dict[str, Row] = {}
    for key, value in settings.items():
        section, _, field = key.partition(".")
        if field:
            sections.setdefault(section, {})[field] = value
    if "optim" in sections and not sections["optim"]["hidden"]:
        del sections["optim"]
    return TrainConfig.model_validate(sections)


def tokenizer(vocab_size: int, folder: Path) -> str:
    """The folder of the tokenizer of this size, learned from the training split if it is not there yet."""
    from dlm.data.config import DataConfig, TokenizerConfig
    from dlm.data.tokenizer_training import train_tokenizer

    out = folder / f"tokenizer-{vocab_size}"
    if not (out / "tokenizer.json").exists():
        data = DataConfig(source="stdlib")
        train_tokenizer(TokenizerConfig(output=str(out), vocab_size=vocab_size, data=data))
    return str(out)


def traces(model: Path, folder: Path) -> str:
    """A store with the order in which a model is sure of the training text: d3LLM's trajectories."""
    from dlm.prepare.config import TrajectoriesConfig
    from dlm.prepare.trajectories import prepare

    store = str(folder / "traces.db")
    sections: dict[str, Row] = {"model": {"name": str(model), "device": "cpu"}, "data": {"source": "stdlib"}}
    sections |= {"sampler": {"rule": "entropy_threshold", "entropy_threshold": 0.5, "block_length": 32}}
    sections |= {"trajectories": {"responses": "forced", "samples": 1024, "length": 128, "prompt_length": 96}}
    sections["trajectories"] |= {"batch_size": 128, "store": store}
    prepare(TrajectoriesConfig.model_validate(sections))
    return store


def scored(folder: Path, options: argparse.Namespace) -> Row:
    """Bits a byte of all held-out files; of a model that sees both sides the lines it fills in, too."""
    import dlm
    from dlm.data.config import DataConfig
    from dlm.evaluation.bound import measure_bound
    from dlm.evaluation.suite.config import EvalConfig
    from dlm.evaluation.suite.run import evaluate_all

    lm = dlm.load(str(folder), dtype="float32", device="cpu")
    bound = measure_bound(lm, DataConfig(source="stdlib"), length=256, sequences=10**6, draws=1)
    found: Row = {"bits_per_byte": bound.bits_per_byte, "bytes": bound.bytes}
    if lm.config.attention == "bidirectional":
        section = {"models": [str(folder)], "dtype": "float32", "device": "cpu", "limit": LINES}
        sections: dict[str, Any] = {"eval": section, "task": [{"kind": "lines", "length": 256}]}
        sections |= {"decoding": [{"rule": "entropy", "check": "none"}]}
        sections |= {"output": {"file": str(folder / "lines.json"), "plot": False}}
        [lines] = evaluate_all(EvalConfig.model_validate(sections)).values["runs"]
        found |= {name: lines["metrics"][name] for name in ("exact", "parses", "parses_left_empty")}
    return found


def written(found: list[Row]) -> str:
    """Both tables as Markdown, and what to know when reading them."""
    machines = "; ".join(sorted({f"{result['machine']}, {result['precision']}" for result in found}))
    sizes = {result["bytes"] for result in found}
    size = " to ".join(f"{n:,}" for n in sorted({min(sizes), max(sizes)})) if found else "no"
    lines = [f"Bits a byte of all held-out files in whole windows: {size} bytes, by tokenizer. {machines}."]
    flops = max((result["flops_a_token"] * result["tokens"] for result in found), default=0)
    lines[0] += f" No run trained with more than {flops:.2g} FLOPs."
    for title, rows in (("From scratch, autoregressive", PRETRAINING), ("From `pico-causal`", CONVERSIONS)):
        results = [result for result in found if result["name"] in rows]
        if results:
            lines += [f"## {title}", f"{told(results)}", table(results, rows)]
    return "\n\n".join(lines)


def told(results: list[Row]) -> str:
    """What a table's ± are, and how far two rows of one seed have to be apart."""
    spread = pooled_deviation(results)
    if spread is None:
        return "One seed a row, so no errors."
    runs = [[r for r in results if r["name"] == name] for name in {r["name"] for r in results}]
    several = sum(len(r) > 1 for r in runs)
    return (
        f"± is a standard error: the deviation over seeds, {spread:.3f} bits, pooled (rows with several: "
        f"{several}), by the root of a row's seeds. Two rows of one seed each differ beyond chance (2 σ) from "
        f"{2 * 2**0.5 * spread:.3f} bits on."
    )


def table(found: list[Row], rows: dict[str, Row]) -> str:
    """The results of one table as Markdown, best first: means over seeds ± their standard errors, of the pooled deviation."""
    spread = pooled_deviation(found)
    runs = {name: [result for result in found if result["name"] == name] for name in rows}
    runs = {name: results for name, results in runs.items() if results}
    lines = ["| recipe | parameters | tokens | bits a byte | seeds | lines exact | files parse | CPU minutes |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, results in sorted(runs.items(), key=lambda item: mean(item[1], "bits_per_byte")):
        shown = f"{mean(results, 'bits_per_byte'):.3f}"
        shown += f" ± {spread / len(results) ** 0.5:.3f}" if spread is not None else ""
        rates = [pooled(results, kind) for kind in ("exact", "parses")]
        lines += [
            f"| {name} | {results[0]['parameters'] / 1e6:.2f} M | {results[0]['tokens'] / 1e6:.2f} M | {shown} "
            f"| {len(results)} | {rates[0]} | {rates[1]} | {mean(results, 'cpu_seconds') / 60:.1f} |"
        ]
    return "\n".join(lines) + "\n"


def mean(results: list[Row], key: str) -> float:
    return statistics.mean(result[key] for result in results)


def pooled_deviation(results: list[Row]) -> float | None:
    """The deviation of bits a byte over seeds, of all rows that have several together; None where none has."""
    runs = [[r["bits_per_byte"] for r in results if r["name"] == name] for name in {r["name"] for r in results}]
    free = sum(len(run) - 1 for run in runs)
    return (
        (sum(statistics.variance(run) * (len(run) - 1) for run in runs if len(run) > 1) / free) ** 0.5 if free else None
    )


def pooled(results: list[Row], kind: str) -> str:
    """The share over all seeds' lines."""
    rates = [result[kind] for result in results if kind in result]
    return str(Rate(sum(r["hits"] for r in rates), sum(r["total"] for r in rates))) if rates else "–"


if __name__ == "__main__":
    raise SystemExit(main())
