"""What alignment costs: steps with a live and with a cached teacher beside plain ones, in one process, in turns.

    python benchmarks/align.py
    python benchmarks/align.py --shape medium --layers 1 3 5 7 --steps 10 --compile

All three runs start from the same random causal checkpoint and see the same sequences of the standard library; a step's
ratio is to the plain step taken beside it, so that both had the same load. It knows no model quality.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "ffn": 192, "vocab": 1024, "length": 64, "batch": 4},
    "small": {"layers": 4, "width": 256, "heads": 4, "ffn": 704, "vocab": 8192, "length": 256, "batch": 8},
    "medium": {"layers": 8, "width": 512, "heads": 8, "ffn": 1408, "vocab": 16384, "length": 512, "batch": 8},
    "large": {"layers": 28, "width": 2048, "heads": 16, "ffn": 6144, "vocab": 65536, "length": 1024, "batch": 8},
}
TARGETS = {"live": 1.6, "cached": 1.1}


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory(prefix="dlm-align-benchmark-") as scratch:
        os.environ["DLM_CACHE"] = str(Path(scratch) / "cache")  # neither reads nor fills the user's
        table = base(options, Path(scratch))
        seconds, facts = measure(options, table, Path(scratch))
    report = {
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        **{key: value for key, value in vars(options).items() if key != "output"},
        **facts,
        "ratios": {name: summarise(seconds[name], seconds["plain"]) for name in TARGETS},
        "seconds": seconds,
    }
    print(f"plain: {statistics.median(seconds['plain']):.4f} s a step (median of {options.steps})")
    for name, found in report["ratios"].items():
        print(
            f"{name}: {found['median']:.2f} times a plain step (quartiles {found['low']:.2f} to {found['high']:.2f}); "
            f"target at most {TARGETS[name]}"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1, default=str) + "\n", "utf-8")
        print(f"written: {options.output}")
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="small", help="shape of network and batch (small)")
    add("--layers", type=int, nargs="+", help="layers that are aligned (all)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16", help="of the cache (bfloat16)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of training (fp32)")
    add("--compile", action="store_true", help="torch.compile all networks")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where to train (cpu)")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads (all)")
    add("--steps", type=int, default=20, help="timed steps of each run (20)")
    add("--warmup", type=int, default=3, help="untimed steps before them; compilation falls in there (3)")
    add("--output", type=Path, default=RESULTS / "align.json", help="the JSON file")
    return parser.parse_args(argv)


def base(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """A random causal checkpoint and its tokenizer in `scratch`; returns the plain run's config as a table."""
    import torch

    from dlm.data import DataConfig, TokenizerConfig, train_tokenizer
    from dlm.models import LM, ModelConfig, Transformer

    s, data = SHAPES[options.shape], DataConfig(source="stdlib")
    settings = TokenizerConfig(output=str(scratch / "tokenizer"), vocab_size=s["vocab"], max_documents=400, data=data)
    tokenizer = train_tokenizer(settings)
    shape = ModelConfig(
        vocab_size=s["vocab"],
        hidden_size=s["width"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["heads"],
        head_dim=s["width"] // s["heads"],
        intermediate_size=s["ffn"],
        tie_word_embeddings=True,
        attention="causal",
        shifted_logits=True,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    network = Transformer(shape)
    network.initialise(torch.Generator().manual_seed(0))
    LM(network, tokenizer).save(scratch / "causal")
    section = {
        "init_from": str(scratch / "causal"),
        "steps": options.steps + options.warmup,
        "batch_size": s["batch"],
        "length": s["length"],
        "precision": options.precision,
        "compile": options.compile,
        "device": options.device,
        "threads": options.threads,
        "warmup_steps": 1,
    }
    return {
        "train": section,
        "data": {"source": "stdlib"},
        "objective": {"truncate_probability": 0.0},  # every step has all its tokens
        "eval": {"sequences": 0},
        "checkpoint": {"every": 0},
        "log": {"progress": False},
    }


def measure(
    options: argparse.Namespace, table: dict[str, Any], scratch: Path
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each timed step of each run, and what writing the cache took."""
    import torch

    from dlm.training.anchors import write_anchors
    from dlm.training.config import TrainConfig
    from dlm.training.run import Run

    align = {"weight": 1.0, "layers": tuple(options.layers) if options.layers else "all"}
    cache = {"anchors": str(scratch / "anchors"), "anchors_dtype": options.dtype}
    sections = {"plain": {}, "live": align, "cached": align | cache}
    configs = {
        name: TrainConfig.model_validate(
            {**table, "train": {**table["train"], "out": str(scratch / name)}, "align": section}
        )
        for name, section in sections.items()
    }
    started = time.perf_counter()
    write_anchors(configs["cached"])
    facts = {"cache_seconds": time.perf_counter() - started}
    facts["cache_megabytes"] = sum(f.stat().st_size for f in (scratch / "anchors").glob("*/*")) / 1e6
    runs = {name: Run(config) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(options.warmup + options.steps):
        for turn in range(len(runs)):  # who goes first changes from step to step
            name = list(runs)[(step + turn) % len(runs)]
            started = time.perf_counter()
            runs[name].optimiser_step()
            if options.device == "cuda":
                torch.cuda.synchronize()
            if step >= options.warmup:
                seconds[name].append(time.perf_counter() - started)
    return seconds, facts


def summarise(seconds: list[float], plain: list[float]) -> dict[str, float]:
    """Median and quartiles of the paired ratios."""
    ratios = [a / b for a, b in zip(seconds, plain, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": median, "low": low, "high": high}


if __name__ == "__main__":
    raise SystemExit(main())
