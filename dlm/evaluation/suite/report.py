"""Results as tables and plots: a row a run, quality against tokens a forward, a bar a task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlm.errors import UserError
from dlm.evaluation.suite.compare import aup, front
from dlm.evaluation.table import markdown

HEADINGS = {
    "model": "model",
    "task": "task",
    "decoding": "decoding",
    "items": "items",
    "quality": "result (95 %)",
    "more": "also",
    "tpf": "TPF",
    "nfe": "NFE",
    "against": "against the reference (95 %), p",
    "front": "front",
}


def rows_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The table's rows; of each task's runs those on the front are marked."""
    rows = []
    best = {id(run) for group in groups(values) for run in _best(group)}
    for run in values["runs"]:
        metrics = run["metrics"]
        row = {name: run[name] for name in ("model", "task", "decoding", "items")}
        row |= {"quality": _quality(run), "more": _more(run), "against": _against(run.get("against"))}
        row |= {"tpf": _rounded(metrics.get("tpf"), 2), "nfe": _rounded(metrics.get("nfe"), 1)}
        rows.append(row | {"front": "yes" if id(run) in best else None})
    return rows


def table(values: dict[str, Any]) -> str:
    """Markdown: every run, then what a sweep comes to."""
    rows = rows_of(values)
    shown = {key: text for key, text in HEADINGS.items() if any(row.get(key) is not None for row in rows)}
    parts = [markdown(rows, shown)]
    for group in groups(values):
        points = [(run["metrics"]["tpf"], (quality_of(run) or (0.0,))[0]) for run in group]
        if len(group) > 1:
            first = f"{group[0]['model']} · {group[0]['task']}"
            parts.append(f"{first}: accuracy under parallelism {aup(points):.1f}; {_verdict(group)}")
    return "\n\n".join(parts) + "\n"


def groups(values: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Runs of one model and task that have a quality and tokens a forward."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in values["runs"]:
        if run["metrics"].get("tpf") and quality_of(run) is not None:
            found.setdefault((run["model"], run["task"]), []).append(run)
    return list(found.values())


def quality_of(run: dict[str, Any]) -> tuple[float, float, float] | None:
    """A run's main figure with the ends of its interval, more being better; None where it has none."""
    found = run["metrics"].get(run["measure"])
    if isinstance(found, dict) and found.get("rate") is not None:
        return found["rate"], found["low"], found["high"]
    found = next((value for name, value in run["metrics"].items() if name.startswith("pass@")), None)
    if isinstance(found, dict):
        error = 1.96 * (found["error"] or 0.0)
        return found["rate"], max(0.0, found["rate"] - error), min(1.0, found["rate"] + error)
    return None


def _best(group: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(group) < 2:
        return []
    return [group[i] for i in front([(run["metrics"]["tpf"], quality_of(run)[0]) for run in group])]  # type: ignore


def _verdict(group: Sequence[dict[str, Any]]) -> str:
    """Whether any decoding is better or worse than the reference beyond chance."""
    apart = [run for run in group if (found := run.get("against")) and found.get("p", 1.0) < 0.05 / len(group)]
    if not apart:
        return "no decoding differs from the reference beyond chance (McNemar, Bonferroni)"
    return f"{len(apart)} of {len(group) - 1} differ from the reference beyond chance (McNemar, Bonferroni)"


def _quality(run: dict[str, Any]) -> str | None:
    found, metrics = quality_of(run), run["metrics"]
    if found is not None:
        return f"{100 * found[0]:.1f} % ({100 * found[1]:.1f}–{100 * found[2]:.1f})"
    if "bits_per_byte" in metrics:
        error = metrics.get("bits_error")
        return f"{metrics['bits_per_byte']:.3f}" + (f" ± {error:.3f}" if error else "") + " bits a byte"
    return None


def _more(run: dict[str, Any]) -> str | None:
    """The other figures, briefly."""
    words = []
    for name, value in run["metrics"].items():
        if name in (run["measure"], "nfe", "tpf", "low", "high") or name.startswith("bits"):
            continue
        if isinstance(value, dict) and value.get("rate") is not None and "rate" in value:
            words.append(f"{name} {100 * value['rate']:.1f} %")
        elif isinstance(value, float):
            words.append(f"{name} {value:.3g}")
        elif name == "lm_eval":
            words += [_lm_eval(task, found) for task, found in value.items()]
    return ", ".join(words) or None


def _lm_eval(task: str, found: dict[str, Any]) -> str:
    shown = []
    for key, value in found["metrics"].items():
        if "_stderr" in key or key == "sample_len":
            continue
        metric, _, filtered = key.partition(",")
        error = found["metrics"].get(f"{metric}_stderr,{filtered}")
        shown.append(f"{metric} {value:.4g}" + (f" ± {error:.2g}" if isinstance(error, float) else ""))
    undecided = found["model"].get("undecided")
    shown += [f"undecided {100 * undecided:.0f} %"] if undecided is not None else []
    return f"{task}: {', '.join(shown)}"


def _against(found: dict[str, Any] | None) -> str | None:
    if found is None:
        return None
    text = f"{100 * found['difference']:+.1f}"
    text += f" ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})" if "low" in found else ""
    return text + (f", p = {found['p']:.2g}" if "p" in found else "")


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def draw(values: dict[str, Any], file: Path) -> Path | None:
    """Quality against tokens a forward, or bars where no task has two decodings; None where there is nothing to draw."""
    found = groups(values)
    if not found:
        return None
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'dlm[plot]' (tables and JSON are complete)") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from dlm.atomic import replacing

    sweeps = [group for group in found if len(group) > 1]
    figure, axes = pyplot.subplots(1, max(1, len(sweeps)) , figsize=(6.0 * max(1, len(sweeps)), 4.6), squeeze=False, layout="constrained")  # fmt: skip
    if sweeps:
        for axis, group in zip(axes[0], sweeps, strict=True):
            _sweep(axis, group)
    else:
        _bars(axes[0][0], [group[0] for group in found])
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=130, format=file.suffix[1:])
    pyplot.close(figure)
    return file


def _sweep(axis: Any, group: Sequence[dict[str, Any]]) -> None:
    """Every decoding with its interval, in the colour of its rule, and the front as a grey line."""
    rules = list(dict.fromkeys(run["decoding"].split()[0] for run in group))
    for rule in rules:
        own = sorted((r for r in group if r["decoding"].split()[0] == rule), key=lambda r: r["metrics"]["tpf"])
        points = [(run["metrics"]["tpf"], *quality_of(run)) for run in own]  # type: ignore[misc]
        tpf, quality, low, high = map(list, zip(*points, strict=True))
        errors = [
            [q - l for q, l in zip(quality, low, strict=True)],
            [h - q for q, h in zip(quality, high, strict=True)],
        ]
        axis.errorbar(tpf, quality, errors, marker="o", markersize=4, linewidth=1, elinewidth=0.7, label=rule)
    best = sorted((run["metrics"]["tpf"], quality_of(run)[0]) for run in _best(group))  # type: ignore[index]
    axis.plot(*zip(*best, strict=True), color="0.8", linewidth=4, zorder=0, label="front")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(
        xlabel="tokens a forward pass", ylabel=group[0]["measure"], title=f"{group[0]['model']} · {group[0]['task']}"
    )
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)


def _bars(axis: Any, runs: Sequence[dict[str, Any]]) -> None:
    for place, run in enumerate(runs):
        value, low, high = quality_of(run)  # type: ignore[misc]
        axis.barh(place, value, xerr=[[value - low], [high - value]], color="tab:blue", alpha=0.8, capsize=3)
    axis.set_yticks(range(len(runs)), [f"{run['model']} · {run['task']}" for run in runs])
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("result, with its interval at 95 %")
