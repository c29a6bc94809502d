"""What latent.py found, as Markdown tables and a plot."""

import statistics
from pathlib import Path
from typing import Any

MAIN = {"ar": "autoregressive", "masked": "masked diffusion", "block": "block diffusion (16)"}
MAIN |= {"latent": "latent diffusion", "latent-block": "latent, blocks of 16 (Cola)"}
MILLISECONDS = (20, 50, 100, 200, 500)
"""Ticks of the plot against time."""


def written(report: dict[str, Any], ablations: list[str], plot: Path | None) -> str:
    """The report; the plot is drawn where there is anything to draw."""
    cells = {name: [run for run in runs.values() if "failed" not in run] for name, runs in report["cells"].items()}
    lines = [
        f"Every row: {report['tflop']:g} · 10^12 training FLOPs, bytes of {report['text']} in sequences of 128.",
        "",
    ]
    lines += [
        "| model | parameters | 10^12 FLOPs | bits a byte, mean of seeds | each seed ± error of the draws |",
        "|---|---|---|---|---|",
    ]
    for name, label in MAIN.items():
        if runs := cells.get(name, []):
            bits = [run["bits"] for run in runs]
            each = ", ".join(f"{run['bits']:.3f} ± {run['error'] or 0:.3f}" for run in runs)
            sign = "" if name == "ar" else "≤ "
            lines.append(
                f"| {label} | {runs[0]['parameters']:,} | {runs[0]['flops']:.3f} | {sign}{statistics.mean(bits):.3f} | {each} |"
            )
    for name, runs in cells.items():
        if name.startswith("reconstruction") and runs:
            right = [f"{runs[0][f'right/{level}']:.2%} under {level} std" for level in ("0", "0.3", "1")]
            text = f"{name.capitalize()}, held out, by a larger autoencoder after {runs[0]['steps']} steps: {', '.join(right)}."
            lines += ["", text]
    lines += [
        "",
        "| samples of | steps | NFE | judge's bits a byte | entropy | distinct 4-grams | repetition | BrierLM | tokens/s |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for run in cells.get("text", []):
        lines += [f"| {kind} text | | | {_quality(run[kind])} | |" for kind in ("real", "shuffled")]
    for name, label in MAIN.items():
        for run in cells.get(name, [])[:1]:
            lines += [
                f"| {label} | {row['steps']} | {row['nfe']} | {_quality(row)} | {row['tokens_a_second']:,.0f} |"
                for row in run["samples"]
            ]
    for run in cells.get("adapter", []):
        for kind in ("normal", "adapter"):
            lines.append(
                f"| one step after VFM, {kind} noise | 1 | {run[kind]['nfe']} | {_quality(run[kind])} | {run[kind]['tokens_a_second']:,.0f} |"
            )
    for run in cells.get("solvers", []):
        for name, row in run.items():
            if isinstance(row, dict) and "judged" in row:
                lines.append(
                    f"| latent diffusion, solver {name} | {row['steps']} | {row['nfe']} | {_quality(row)} | {row['tokens_a_second']:,.0f} |"
                )
    base, tried = cells.get("latent", []), [name for name in ablations if cells.get(name)]
    if base and tried:
        lines += [
            "",
            "| ablation, seed 0 | bits a byte ≤ | against `latent` | judge's bits a byte, 32 steps | entropy |",
            "|---|---|---|---|---|",
        ]
        for name in tried:
            for run in cells[name]:
                row = run["samples"][0]
                lines.append(
                    f"| {name} | {run['bits']:.3f} ± {run['error']:.3f} | {run['bits'] - base[0]['bits']:+.3f} | {row['judged']:.2f} | {row['entropy']:.2f} |"
                )
    for run in cells.get("sudoku", []):
        trained = f"the first two trained with {run['tflop']:g} · 10^12 FLOPs each"
        lines += ["", f"| Sudoku, 30 to 45 empty cells; {trained} | cells right | puzzles solved |", "|---|---|---|"]
        lines += [
            f"| {name} | {value['cells']:.1%} | {value['solved']:.0%} |"
            for name, value in run.items()
            if isinstance(value, dict) and "cells" in value
        ]
    if plot is not None:
        _draw(cells, plot)
    return "\n".join(lines)


def _quality(row: dict[str, Any]) -> str:
    return f"{row['judged']:.2f} | {row['entropy']:.2f} | {row['distinct']:.2f} | {row['repetition']:.2f} | {row['brier']:.1f}"


def _draw(cells: dict[str, list[dict[str, Any]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for name, label in MAIN.items():
        if runs := cells.get(name, []):
            left.bar(label.replace(" ", "\n", 1), statistics.mean(run["bits"] for run in runs), color="tab:blue")
            left.plot([label.replace(" ", "\n", 1)] * len(runs), [run["bits"] for run in runs], "k.", ms=4)
            rows = runs[0]["samples"]
            judged = [row["judged"] for row in rows]
            middle.plot([row["nfe"] for row in rows], judged, "o-", label=label)
            right.plot([1e6 / row["tokens_a_second"] for row in rows], judged, "o-", label=label)
    left.set_ylabel("bits a byte of held-out text (bound)")
    left.tick_params(axis="x", labelsize=7)
    middle.set_xscale("log", base=2)
    middle.set_xlabel("forwards (NFE)")
    right.set_xscale("log")
    right.set_xticks(MILLISECONDS, [str(tick) for tick in MILLISECONDS])
    right.minorticks_off()
    right.set_xlabel("milliseconds for a thousand bytes")
    for quality in (middle, right):
        for run in cells.get("text", []):
            quality.axhline(run["real"]["judged"], color="gray", ls=":", label="real text")
        quality.set_ylabel("judge's bits a byte of samples")
    middle.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
