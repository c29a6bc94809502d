"""What the rows of compare.py come to over their seeds: a table, claims, a plot. Runs nothing."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dlm.evaluation.table import markdown

ROWS = {  # in the order they can run: later ones start from earlier ones
    "ar": "autoregressive",
    "scratch": "random masking, from scratch",
    "block": "block diffusion (4), from scratch",
    "random": "random masking, from AR",
    "align-4": "+ alignment, 4 layers",
    "align-all": "+ alignment, all layers",
    "trajectories": "+ trajectories",
}
SLACK = 1.05  # equal quality: at most so many times the bits of `random` at a token a forward
# Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = ("#000000", "#E69F00", "#009E73", "#0072B2", "#56B4E9", "#CC79A7", "#D55E00")
MARKERS = "sov^D<P"
Result = dict[str, Any]
Runs = Mapping[str, Mapping[int, Result]]
"""Row -> seed -> what the run measured, or why it failed."""


def spread(values: Sequence[float | None]) -> tuple[float, float | None] | None:
    """Mean and standard error over seeds (no error with one seed), or None where a seed has no value."""
    if not values or None in values:
        return None
    known = [float(v) for v in values if v is not None]
    return statistics.mean(known), statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None


def at_equal_quality(frontier: Sequence[Result], level: float) -> float | None:
    """The most tokens a forward for `level` bits, interpolated between thresholds; None if all cost more."""
    points = sorted((point["tpf"], point["bits"]) for point in frontier)
    good = [tpf for tpf, bits in points if bits <= level]
    for (slow, better), (fast, worse) in pairwise(points):
        if better <= level < worse:
            good.append(slow + (fast - slow) * (level - better) / (worse - better))
    return max(good, default=None)


def reached(curve: Sequence[Sequence[float]], level: float) -> float | None:
    """The first validated step whose bits are at most `level`."""
    return next((step for step, _, bits, _ in curve if bits <= level), None)


def finished(results: Runs, name: str) -> list[Result]:
    """The row's results in the order of seeds; none where a seed failed."""
    runs = list(results.get(name, {}).values())
    return [] if any("failed" in r for r in runs) else runs


def summary(results: Runs) -> dict[str, Result]:
    levels = [SLACK * r["frontier"][0]["bits"] for r in finished(results, "random")]
    rows: dict[str, Result] = {}
    for name, seeds in results.items():
        runs = finished(results, name)
        if not runs:
            rows[name] = {"failed": next(r["failed"] for r in seeds.values() if "failed" in r)}
            continue
        start = runs[0]["from"]
        row: Result = {"from": start and start.rpartition("-")[0], **{k: runs[0][k] for k in ("parameters", "steps")}}
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


def claims(results: Runs) -> list[str]:
    """The claims that the comparison tests, each with what was measured."""
    runs, said = {name: finished(results, name) for name in ROWS}, []

    def gaps(less: str, more: str) -> list[float]:
        return [b["bits"] - a["bits"] for a, b in zip(runs[less], runs[more], strict=True)]

    for less, more in (("ar", "block"), ("block", "scratch")):
        if runs["ar"] and runs["block"] and runs["scratch"]:
            found = gaps(less, more)
            wins = f"{sum(gap > 0 for gap in found)} of {len(found)} seeds"
            said.append(f"{less} < {more} in {wins}, by {_plus(spread(found), '.3f')} bits a byte.")
    for name in ("align-4", "align-all", "trajectories"):
        if runs["random"] and runs[name]:
            gap = _plus(spread(gaps("random", name)), "+.3f")
            said.append(f"{name} against random, the same seed: {gap} bits a byte.")
    for name in ("random", "align-4", "align-all"):
        if runs[name] and runs["scratch"]:
            pairs = list(zip(runs[name], runs["scratch"], strict=True))
            steps = [reached(r["curve"], s["bits"]) for r, s in pairs]
            share = spread([None if n is None else n / s["steps"] for n, (_, s) in zip(steps, pairs, strict=True)])
            shown = "not in every seed" if share is None else f"at {_plus(share, '.1%')} of the steps"
            every = runs["scratch"][0]["curve"][0][0]
            said.append(f"{name} reaches scratch's final bound {shown} (validated every {every}).")
    return said


def written(report: Result) -> str:
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
        curve, ways = row["curve"], row["frontier"]
        xs = ((steps, curve, [p["step"] for p in curve]), (clock, curve, [p["seconds"][0] for p in curve]))
        for axes, points, x in (*xs, (frontier, ways, [p["tpf"][0] for p in ways])):
            bits, errors = zip(*((mean, error or 0.0) for mean, error in (p["bits"] for p in points)), strict=True)
            axes.errorbar(x, bits, errors, elinewidth=0.6, **style)
    steps.set(xlabel="optimiser steps", ylabel="bits a byte of held-out text (bound)")
    clock.set(xlabel="seconds of training")
    frontier.set(xlabel="tokens a forward pass", ylabel="bits a byte of a held-out continuation")
    for axes in (steps, clock, frontier):
        axes.grid(alpha=0.3)
    frontier.legend(fontsize=8)
    figure.savefig(file)
    print(f"written: {file}")
