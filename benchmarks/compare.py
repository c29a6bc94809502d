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
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm import config as toml
from dlm.atomic import write_text
from dlm.evaluation.card import machine
from dlm.evaluation.table import markdown

if TYPE_CHECKING:
    import torch

    from dlm.models.lm import LM
    from dlm.training.config import TrainConfig

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "compare"
CONFIG_OUT = "runs/compare/"  # what paths in the configs begin with; they end in -0, the seed
ROWS = {  # in the order they can run: later ones start from earlier ones
    "ar": "autoregressive",
    "scratch": "random masking, from scratch",
    "block": "block diffusion (4), from scratch",
    "random": "random masking, from AR",
    "align-4": "+ alignment, 4 layers",
    "align-all": "+ alignment, all layers",
    "trajectories": "+ trajectories",
}
THRESHOLDS = (2.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3)  # above 1: a token a step
WINDOWS, GIVEN, BLOCK = 32, 96, 32  # continuations: how many, bytes before them, tokens decoded together
SLACK = 1.05  # equal quality: at most so many times the bits of `random` at a token a step
Result = dict[str, Any]


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="rows to run and to show (all)")
    add("--seeds", type=int, default=3, help="runs of each row, with seeds from 0 (3)")
    add("--out", type=Path, default=Path(CONFIG_OUT), help=f"where runs are kept ({CONFIG_OUT})")
    add("--extra", type=Path, help="TOML that is merged over every row's")
    add("--gather", action="store_true", help="run nothing")
    add("--no-plot", action="store_true", help="draw nothing (the plot needs the extra `plot`)")
    add("--results", type=Path, default=Path(__file__).parent / "results", help="folder of the table, JSON and plot")
    add("--child", nargs=2, metavar=("ROW", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# --- running -----------------------------------------------------------------------------------------------------------


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


# --- the child: one row with one seed ----------------------------------------------------------------------------------


def run(name: str, seed: int, options: argparse.Namespace) -> Result:
    """Prepare, train and measure: everything the row's line is made of."""
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
    # Whatever a row trains on, its bound is that of one held-out text.
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


# --- what it comes to --------------------------------------------------------------------------------------------------


def spread(values: Sequence[float | None]) -> tuple[float, float | None] | None:
    """Mean and standard error over seeds, which one seed has not; nothing where a seed has none."""
    if not values or None in values:
        return None
    known = [float(v) for v in values if v is not None]
    return statistics.mean(known), statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None


def at_equal_quality(frontier: Sequence[Result], level: float) -> float | None:
    """Most tokens a forward that cost at most `level` bits, linear between the thresholds; none where none do."""
    points = sorted((point["tpf"], point["bits"]) for point in frontier)
    good = [tpf for tpf, bits in points if bits <= level]
    for (slow, better), (fast, worse) in pairwise(points):
        if better <= level < worse:
            good.append(slow + (fast - slow) * (level - better) / (worse - better))
    return max(good, default=None)


def reached(curve: Sequence[Sequence[float]], level: float) -> float | None:
    """The first validated step whose bits are at most `level`."""
    return next((step for step, _, bits, _ in curve if bits <= level), None)


def finished(results: dict[str, dict[int, Result]], name: str) -> list[Result]:
    """The row's results in the order of seeds; none where a seed failed."""
    runs = list(results.get(name, {}).values())
    return [] if any("failed" in r for r in runs) else runs


def summary(results: dict[str, dict[int, Result]]) -> dict[str, Result]:
    """Each row over its seeds."""
    levels = [SLACK * r["frontier"][0]["bits"] for r in finished(results, "random")]
    rows: dict[str, Result] = {}
    for name, seeds in results.items():
        runs = finished(results, name)
        if not runs:
            rows[name] = {"failed": next(r["failed"] for r in seeds.values() if "failed" in r)}
            continue
        row: Result = {
            "from": runs[0]["from"] and runs[0]["from"].rpartition("-")[0],
            "parameters": runs[0]["parameters"],
            "steps": runs[0]["steps"],
        }
        row |= {k: spread([r[k] for r in runs]) for k in ("bits", "seconds", "tokens_per_second", "peak_memory_mib")}
        row["curve"] = [
            {"step": points[0][0], "seconds": spread([p[1] for p in points]), "bits": spread([p[2] for p in points])}
            for points in zip(*(r["curve"] for r in runs), strict=True)
        ]
        row["frontier"] = [
            {"threshold": points[0]["threshold"]} | {k: spread([p[k] for p in points]) for k in ("tpf", "bits")}
            for points in zip(*(r["frontier"] for r in runs), strict=True)
        ]
        pairs = zip(runs, levels, strict=True) if levels else []
        row["tpf"] = spread([at_equal_quality(r["frontier"], level) for r, level in pairs])
        rows[name] = row
    return rows


def claims(results: dict[str, dict[int, Result]]) -> list[str]:
    """What the grid was built to show, with what it showed."""
    claims = []
    found = {name: [r["bits"] for r in finished(results, name)] for name in ("ar", "block", "scratch")}
    if all(found.values()):
        for less, more in (("ar", "block"), ("block", "scratch")):
            gaps = [b - a for a, b in zip(found[less], found[more], strict=True)]
            wins = sum(gap > 0 for gap in gaps)
            claims.append(
                f"{less} < {more} in {wins} of {len(gaps)} seeds, by {_plus(spread(gaps), '.3f')} bits a byte."
            )
    base = finished(results, "random")
    for name in ("align-4", "align-all", "trajectories"):
        runs = finished(results, name)
        if base and runs:
            gaps = [b["bits"] - a["bits"] for a, b in zip(base, runs, strict=True)]
            claims.append(f"{name} against random, the same seed: {_plus(spread(gaps), '+.3f')} bits a byte.")
    scratch = finished(results, "scratch")
    for name in ("random", "align-4", "align-all"):
        runs = finished(results, name)
        if runs and scratch:
            steps = [reached(r["curve"], s["bits"]) for r, s in zip(runs, scratch, strict=True)]
            share = spread([None if n is None else n / s["steps"] for n, s in zip(steps, scratch, strict=True)])
            shown = "not in every seed" if share is None else f"at {_plus(share, '.1%')} of the steps"
            claims.append(
                f"{name} reaches scratch's final bound {shown} (validated every {scratch[0]['curve'][0][0]})."
            )
    return claims


def written(report: Result) -> str:
    """The table and the claims as Markdown."""
    lines = []
    for name, row in report["rows"].items():
        line = {"row": f"{name}: {ROWS[name]}"}
        if "failed" in row:
            line["bits"] = f"failed: {row['failed']}"
        else:
            line |= {"bits": _plus(row["bits"], ".3f"), "tpf": _plus(row["tpf"], ".2f"), "from": row["from"] or "–"}
            line |= {"token": _plus(row["frontier"][0]["bits"], ".3f"), "seconds": _plus(row["seconds"], ".0f")}
            line |= {"speed": _plus(row["tokens_per_second"], ",.0f"), "memory": _plus(row["peak_memory_mib"], ",.0f")}
        lines.append(line)
    headings = {"row": "", "from": "starts from", "bits": "bits a byte", "token": "bits, a token a forward"}
    headings |= {"tpf": "TPF at equal quality", "seconds": "training, s", "speed": "tokens/s", "memory": "peak MiB"}
    text = (
        f"{report['seeds']} seeds, mean ± standard error over them; {report['machine']}. "
        f"{'Over every config: ' + json.dumps(report['extra']) + '.' if report['extra'] else ''}\n\n"
        "Bits a byte: the likelihood bound of held-out text (exact for ar). Bits, a token a forward: held-out "
        "continuations revealed in the model's own order. TPF at equal quality: tokens a forward at which these cost "
        f"{SLACK - 1:.0%} more than `random` needs a token a forward."
    )
    return "\n\n".join([text, markdown(lines, headings), "\n".join(f"- {claim}" for claim in report["claims"])])


def _plus(value: tuple[float, float | None] | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{value[0]:{form}}" + ("" if value[1] is None else f" ± {value[1]:{form.lstrip('+')}}")


def plot(rows: dict[str, Result], file: Path) -> None:
    """Bits against steps, against seconds, and against tokens a forward; bars are standard errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), dpi=130, layout="constrained")
    steps, clock, frontier = figure.subplots(1, 3)
    for number, (name, row) in enumerate(rows.items()):
        if "failed" in row:
            continue
        style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 4, "linewidth": 1.2, "label": name}
        bits, errors = zip(*((mean, error or 0.0) for mean, error in (p["bits"] for p in row["curve"])), strict=True)
        for axes, x in ((steps, [p["step"] for p in row["curve"]]), (clock, [p["seconds"][0] for p in row["curve"]])):
            axes.errorbar(x, bits, errors, elinewidth=0.6, **style)
        bits, errors = zip(*((mean, error or 0.0) for mean, error in (p["bits"] for p in row["frontier"])), strict=True)
        frontier.errorbar([p["tpf"][0] for p in row["frontier"]], bits, errors, elinewidth=0.6, **style)
    steps.set(xlabel="optimiser steps", ylabel="bits a byte of held-out text (bound)")
    clock.set(xlabel="seconds of training")
    frontier.set(xlabel="tokens a forward pass", ylabel="bits a byte of a held-out continuation")
    for axes in (steps, clock, frontier):
        axes.grid(alpha=0.3)
    frontier.legend(fontsize=8)
    figure.savefig(file)
    print(f"written: {file}")


# Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = ("#000000", "#E69F00", "#009E73", "#0072B2", "#56B4E9", "#CC79A7", "#D55E00")
MARKERS = "sov^D<P"


if __name__ == "__main__":
    raise SystemExit(main())
