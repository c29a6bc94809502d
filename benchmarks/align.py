"""What alignment costs: steps with a live and with a cached teacher beside plain ones, in one process, in turns.

    python benchmarks/align.py
    python benchmarks/align.py --shape medium --layers 1 3 5 7 --steps 10 --compile

All three runs start from the same random causal checkpoint and see the same sequences of the standard library; a step's
ratio is to the plain step taken beside it, so that both had the same load.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from contenders import DATA, QUIET
from measuring import RESULTS, parser, quartiles, ratios, shown, timed, write
from train import SHAPES, network_of, tokenizer_of

TARGETS = {"live": 1.6, "cached": 1.1}


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory(prefix="dlm-align-benchmark-") as scratch:
        os.environ["DLM_CACHE"] = str(Path(scratch) / "cache")  # the user's cache is neither read nor written
        table = base(options, Path(scratch))
        seconds, facts = measure(options, table, Path(scratch))
    from dlm.evaluation.card import machine

    print(f"plain: {statistics.median(seconds['plain']):.4f} s a step (median of {options.steps})")
    found = {name: quartiles(ratios(seconds[name], seconds["plain"])) for name in TARGETS}
    for name, ratio in found.items():
        print(f"{name}: {shown(ratio)} times a plain step (quartiles); target at most {TARGETS[name]}")
    named = {key: value for key, value in vars(options).items() if key != "output"}
    write(options.output, {"machine": machine(), **named, **facts, "ratios": found, "seconds": seconds})
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    add = words.add_argument
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
    return words.parse_args(argv)


def base(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """A random causal checkpoint and its tokenizer in `scratch`; returns the plain run's config as a table."""
    import torch

    from dlm.models import LM, ModelConfig, Transformer

    s = SHAPES[options.shape]
    tokenizer = tokenizer_of(s["vocab"], scratch / "tokenizer")
    special = {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = ModelConfig(**network_of(s), **special, attention="causal", shifted_logits=True)
    network = Transformer(shape)
    network.initialise(torch.Generator().manual_seed(0))
    LM(network, tokenizer).save(scratch / "causal")
    section = {name: getattr(options, name) for name in ("precision", "compile", "device", "threads")}
    section |= {"steps": options.steps + options.warmup, "batch_size": s["batch"], "length": s["length"]}
    section |= {"init_from": str(scratch / "causal"), "warmup_steps": 1}
    return {"train": section, "data": DATA, **QUIET}


def measure(
    options: argparse.Namespace, table: dict[str, Any], scratch: Path
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each timed step of each run, and what writing the cache took."""
    from dlm.training.anchors import write_anchors
    from dlm.training.config import TrainConfig
    from dlm.training.run import Run

    live = {"weight": 1.0, "layers": tuple(options.layers) if options.layers else "all"}
    cached = live | {"anchors": str(scratch / "anchors"), "anchors_dtype": options.dtype}
    configs = {}
    for name, section in {"plain": {}, "live": live, "cached": cached}.items():
        train = {**table["train"], "out": str(scratch / name)}
        configs[name] = TrainConfig.model_validate({**table, "train": train, "align": section})
    taken, _ = timed(lambda: write_anchors(configs["cached"]))
    size = sum(file.stat().st_size for file in (scratch / "anchors").glob("*/*"))
    runs = {name: Run(config) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(options.warmup + options.steps):
        first = step % len(runs)  # another run goes first in each step
        for name in (*list(runs)[first:], *list(runs)[:first]):
            one, _ = timed(runs[name].optimiser_step, options.device)
            seconds[name] += [one["wall"]] if step >= options.warmup else []
    return seconds, {"cache_seconds": taken["wall"], "cache_megabytes": size / 1e6}


if __name__ == "__main__":
    raise SystemExit(main())
