"""Results as Markdown: a row a run, and what a sweep comes to."""

from collections.abc import Sequence
from typing import Any

from dlm.evaluation.suite.compare import aup
from dlm.evaluation.suite.sweep import Point, best, groups, quality_of, ways
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


WAYS = {
    "way": "blocks, strategy, cache, draft",
    "decodings": "decodings",
    "best": "best result",
    "tpf": "at TPF",
    "aup": "AUP",
    "equal": "TPF at equal results, of the same blocks one at a time",
}


def rows_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The table's rows; of each task's runs those on the front are marked."""
    rows = []
    fronts = {id(point.run) for group in groups(values) if len(group) > 1 for point in best(group)}
    for run in values["runs"]:
        metrics = run["metrics"]
        row = {name: run[name] for name in ("model", "task", "decoding", "items")}
        row |= {"quality": _quality(run), "more": _more(run), "against": _against(run)}
        row |= {"tpf": _rounded(metrics.get("tpf"), 2), "nfe": _rounded(metrics.get("nfe"), 1)}
        rows.append(row | {"front": "yes" if id(run) in fronts else None})
    return rows


def table(values: dict[str, Any]) -> str:
    """Markdown: every run, then what each sweep comes to."""
    rows = rows_of(values)
    shown = {key: text for key, text in HEADINGS.items() if any(row.get(key) is not None for row in rows)}
    parts = [markdown(rows, shown)]
    for group in groups(values):
        if len(group) > 1:
            run = group[0].run
            words = [_verdict(group)]
            if group[0].rises:
                found = aup([(point.tpf, point.quality) for point in best(group)])
                words.insert(0, f"accuracy under parallelism of the front {found:.1f}")
            parts.append(f"{run['model']} · {run['task']}: {'; '.join(words)}")
            if len(kinds := ways(group)) > 1:
                parts.append(markdown([_way(row, group[0].rises) for row in kinds], WAYS))
    return "\n\n".join(parts) + "\n"


def _way(row: dict[str, Any], rises: bool) -> dict[str, Any]:
    """A row of the table of ways."""
    quality = f"{100 * row['best']:.1f} %" if rises else f"{row['best']:.3f} bits a byte"
    equal = None
    if "of" in row:
        low, high = row["ratios"] or (0.0, 0.0)
        equal = (
            f"{low:.2f}–{high:.2f}×, at {row['matched']} of {row['of']} points" if row["matched"] else "never as good"
        )
    return {**row, "best": quality, "tpf": f"{row['tpf']:.2f}", "aup": _rounded(row["aup"], 1), "equal": equal}


def _verdict(group: Sequence[Point]) -> str:
    """Whether any decoding is better or worse than the reference beyond chance."""
    compared = [found for point in group if (found := point.run.get("against"))]
    if all("p" in found for found in compared):
        apart, test = [found for found in compared if found["p"] < 0.05 / max(1, len(compared))], "McNemar, Bonferroni"
    else:
        apart, test = (
            [found for found in compared if found.get("low", 0) > 0 or found.get("high", 0) < 0],
            "bootstrap, 95 % each: of twenty that are alike, one would",
        )
    if not apart:
        return f"no decoding differs from the reference beyond chance ({test})"
    return f"{len(apart)} of {len(compared)} differ from the reference beyond chance ({test})"


def _quality(run: dict[str, Any]) -> str | None:
    found, metrics = quality_of(run), run["metrics"]
    if "bits_per_byte" in metrics:
        error = metrics.get("bits_error")
        return f"{metrics['bits_per_byte']:.3f}" + (f" ± {error:.3f}" if error else "") + " bits a byte"
    return None if found is None else f"{100 * found[0]:.1f} % ({100 * found[1]:.1f}–{100 * found[2]:.1f})"


def _more(run: dict[str, Any]) -> str | None:
    """The other figures, briefly."""
    words = []
    for name, value in run["metrics"].items():
        if name in (run["measure"], "nfe", "tpf", "low", "high") or name.startswith("bits"):
            continue
        if isinstance(value, dict) and value.get("rate") is not None and "rate" in value:
            words.append(f"{name} {100 * value['rate']:.1f} %")
        elif name in ("by_empty", "by_source"):
            words += [f"{key} {100 * found['rate']:.1f} %" for key, found in value.items()]
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


def _against(run: dict[str, Any]) -> str | None:
    """The difference to the reference: percentage points, or bits a byte that are saved."""
    if (found := run.get("against")) is None:
        return None
    scale, form = (1, "+.3f") if run["measure"] == "bits_per_byte" else (100, "+.1f")
    text = f"{scale * found['difference']:{form}}"
    text += f" ({scale * found['low']:{form}} to {scale * found['high']:{form}})" if "low" in found else ""
    return text + (f", p = {found['p']:.2g}" if "p" in found else "")


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
