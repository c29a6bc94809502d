"""What each way of training buys: the rows of configs/compare over seeds, as a table, JSON and a plot.

    python benchmarks/compare.py                                # all rows, 3 seeds; benchmarks/results/compare.*
    python benchmarks/compare.py --rows ar scratch --seeds 1    # some of it; what is finished is not run again
    python benchmarks/compare.py --gather                       # only the table and the plot, of what is finished

Every row trains on the same text with the same steps and tokens, each in a process of its own. What cannot run fails its
row alone. Quality is bits a byte of held-out text: the likelihood bound, and for decoding the cost of held-out
continuations whose true tokens are revealed where and when the model is confident.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grid import ROWS, Result, claims, plot, summary, written
from measuring import RESULTS, parser

from dlm import config as toml
from dlm.atomic import write_text
from dlm.evaluation.card import machine

if TYPE_CHECKING:
    import torch

    from dlm.models.lm import LM
    from dlm.training.config import TrainConfig

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "compare"
CONFIG_OUT = "runs/compare/"  # how paths in the configs begin; they end in -0, the seed
THRESHOLDS = (2.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3)  # above 1: a token a step
WINDOWS, GIVEN, BLOCK = 32, 96, 32  # continuations: how many, bytes before them, tokens decoded together


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    if options.child:
        name, seed = options.child
        write_text(options.out / f"{name}-{seed}" / "result.json", json.dumps(run(name, int(seed), options)))
        return 0
    if not options.gather:
        _tokenizer(options)
    results: dict[str, dict[int, Result]] = {name: {} for name in options.rows}
    for seed in range(options.seeds):
        for name in options.rows:
            results[name][seed] = _result(name, seed, options)
    report = {"machine": machine(), "seeds": options.seeds, "rows": summary(results), "claims": claims(results)}
    report |= {"extra": toml.read(options.extra) if options.extra else {}, "runs": results}
    text = written(report)
    print("\n" + text)
    options.results.mkdir(parents=True, exist_ok=True)
    write_text(options.results / "compare.json", json.dumps(report, indent=1) + "\n")
    write_text(options.results / "compare.md", text + "\n")
    if not options.no_plot:
        plot(report["rows"], options.results / "compare.png")
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    add = words.add_argument
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="rows to run and to show (all)")
    add("--seeds", type=int, default=3, help="runs of each row, with seeds from 0 (3)")
    add("--out", type=Path, default=Path(CONFIG_OUT), help=f"where runs are kept ({CONFIG_OUT})")
    add("--extra", type=Path, help="TOML that is merged over every row's")
    add("--gather", action="store_true", help="run nothing")
    add("--no-plot", action="store_true", help="draw nothing (the plot needs the extra `plot`)")
    add("--results", type=Path, default=RESULTS, help="folder of the table, JSON and plot")
    add("--child", nargs=2, metavar=("ROW", "SEED"), help=argparse.SUPPRESS)
    return words.parse_args(argv)


def _tokenizer(options: argparse.Namespace) -> None:
    from dlm.data.config import TokenizerConfig
    from dlm.data.tokenizer_training import train_tokenizer

    if not (options.out / "tokenizer").is_dir():
        file = CONFIGS / "tokenizer.toml"
        config = toml.load(TokenizerConfig, [file], {"output": str(options.out / "tokenizer")})
        train_tokenizer(config)


def _result(name: str, seed: int, options: argparse.Namespace) -> Result:
    """What the run left, after running it where it has not finished."""
    file = options.out / f"{name}-{seed}" / "result.json"
    if not file.is_file() and not options.gather:
        words = [sys.executable, __file__, "--child", name, str(seed), "--out", str(options.out)]
        words += ["--extra", str(options.extra)] if options.extra else []
        print(f"{name}, seed {seed}", flush=True)
        done = subprocess.run(words, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            print(f"  failed: {lines[-1]}", flush=True)
            return {"failed": lines[-1]}
    return json.loads(file.read_text("utf-8")) if file.is_file() else {"failed": "not run"}


def row_config(name: str, seed: int, out: Path, extra: Path | None = None) -> "TrainConfig":
    """base.toml, the row's own file and `extra`, with the folders of this seed."""
    from dlm.training.config import TrainConfig

    files = (CONFIGS / "base.toml", CONFIGS / f"{name}.toml", *([extra] if extra else []))
    tables = [placed(toml.read(file), seed, out) for file in files]
    merged: dict[str, dict[str, Any]] = {}
    for section in (section for table in tables for section in table):
        merged[section] = {key: value for table in tables for key, value in table.get(section, {}).items()}
    merged["train"]["seed"] = seed
    if "init_from" in merged["train"]:
        del merged["model"]  # base.toml's is for new networks
    return toml.check(TrainConfig, merged, f"configs/compare/{name}.toml")


def placed(value: Any, seed: int, out: Path) -> Any:
    """A table in which every path under runs/compare is one under `out`, and of this seed."""
    if isinstance(value, dict):
        return {key: placed(entry, seed, out) for key, entry in value.items()}
    if isinstance(value, list):
        return [placed(entry, seed, out) for entry in value]
    if isinstance(value, str) and value.startswith(CONFIG_OUT):
        return str(out / re.sub(r"-0(?=$|\.)", f"-{seed}", value.removeprefix(CONFIG_OUT)))
    return value


def make_traces(seed: int, options: argparse.Namespace) -> None:
    """The trajectories that the row of that name trains on."""
    from dlm.prepare.config import TrajectoriesConfig
    from dlm.prepare.trajectories import prepare

    table = placed(toml.read(CONFIGS / "traces.toml"), seed, options.out)
    prepare(toml.check(TrajectoriesConfig, table, "configs/compare/traces.toml"))


def run(name: str, seed: int, options: argparse.Namespace) -> Result:
    """All figures of one row: prepare its data, train, measure."""
    import torch

    import dlm
    from dlm.bench.peak import Peak
    from dlm.training.loop import go
    from dlm.training.run import Run
    from dlm.training.validate import HeldOut

    config = row_config(name, seed, options.out, options.extra)
    t, e = config.train, config.eval
    if name == "trajectories":
        make_traces(seed, options)
    training = Run(config)
    # Rows train on different data; their bounds are taken on the same held-out text.
    tokenizer, text = training.model.tokenizer, row_config("ar", seed, options.out, options.extra).data
    assert tokenizer is not None
    sizes = torch.as_tensor(tokenizer.token_bytes)
    held_out = HeldOut.of(text, tokenizer, t.length, e.sequences, e.batch_size, seed)
    assert held_out is not None
    training.held_out = held_out
    with Peak(training.accelerator.device) as peak:
        go(training)
    lm = dlm.load(t.out)
    ids = torch.cat([rows for rows, _ in held_out.batches])[:WINDOWS].to(lm.device)
    frontier = [revealed(lm, ids, threshold, sizes) for threshold in (THRESHOLDS if name != "ar" else THRESHOLDS[:1])]
    return {
        **from_metrics(Path(t.out) / "metrics.jsonl"),
        "parameters": sum(p.numel() for p in lm.network.parameters()),
        "from": t.init_from and Path(t.init_from).name,
        "peak_memory_mib": peak.bytes / 2**20,
        "frontier": frontier,
    }


def from_metrics(metrics: Path) -> Result:
    """The run's own account: its curve as (step, seconds of training, bits a byte, their Monte Carlo error), its speed."""
    lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    seconds = {line["step"]: line["seconds"] for line in lines if "loss" in line}
    bounds = [line for line in lines if "bits_per_byte" in line]
    curve = [(b["step"], seconds[b["step"]], b["bits_per_byte"], b["bits_per_byte_error"]) for b in bounds]
    last = [line for line in lines if "loss" in line][-1]
    return {
        "curve": curve,
        "bits": curve[-1][2],
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": last["tokens"] / last["seconds"],
    }


def revealed(lm: "LM", ids: "torch.Tensor", threshold: float, sizes: "torch.Tensor") -> Result:
    """The true ends of rows (b, l), decoded block after block: each forward reveals what it is sure of, and the surest.

    What the revealed tokens cost, -log p of each in the forward that revealed it, bounds -log p of the text; with a
    token a forward it is the likelihood under the model's own order, which for an autoregressive one is the likelihood.
    """
    import torch

    length = 1 if lm.config.attention == "causal" else lm.config.block_length or BLOCK
    block = torch.arange(ids.shape[1], device=ids.device) // length
    masked = (torch.arange(ids.shape[1], device=ids.device) >= GIVEN).expand_as(ids)
    nats, forwards = 0.0, 0
    while masked.any():
        live = masked.any(-1)  # (b,)
        truth, left = ids[live], masked[live]
        active = left & (block == block.masked_fill(~left, len(block)).amin(-1, keepdim=True))
        with torch.no_grad():
            p = lm.predict(torch.where(left, lm.require_mask_id(), truth), active).log_softmax(-1)  # (n, v)
        sure, cost = torch.full((2, *truth.shape), -math.inf, device=ids.device)
        sure[active] = p.amax(-1)
        cost[active] = -p.gather(-1, truth[active, None]).squeeze(-1)
        found = active & ((sure >= math.log(threshold)) | (sure == sure.amax(-1, keepdim=True)))
        nats += cost[found].sum().item()
        masked = masked.masked_scatter(live[:, None].expand_as(masked), left & ~found)
        forwards += len(truth)
    size = int(sizes[ids[:, GIVEN:]].sum())
    return {"threshold": threshold, "tpf": ids[:, GIVEN:].numel() / forwards, "bits": nats / size / math.log(2)}


if __name__ == "__main__":
    raise SystemExit(main())
