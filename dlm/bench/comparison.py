"""Two runs over the same questions side by side: ratios, equal tokens, tables and samples."""

from typing import Any

from dlm.bench.finding import Table
from dlm.bench.load import Service

HEADINGS = {
    "measure": "",
    "blockinfer": "engine",
    "vanilla_llada": "vanilla",
    "ratio": "engine / vanilla",
}
MEASURES = {  # key of a run -> what the table calls it, and how it is written
    "total_time": ("total time, s", "{:.2f}"),
    "total_tokens": ("generated tokens", "{:,}"),
    "throughput": ("tokens/s", "{:,.1f}"),
    "avg_latency": ("time a question, s", "{:.3f}"),
    "nfe": ("NFE", "{:,}"),
    "tpf": ("TPF", "{:.2f}"),
    "forwards": ("packed forwards", "{:,}"),
    "accuracy": ("accuracy, %", "{:.1f}"),
    "peak_memory_mib": ("peak memory, MiB", "{:,.0f}"),
}
SPREADS = {"latency": "latency", "time_to_first_block": "time to first block"}


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """How much better than plain decoding; accuracy in points."""
    return {
        "throughput_speedup": ours["throughput"] / max(theirs["throughput"], 1e-9),
        "time_speedup": theirs["total_time"] / ours["total_time"],
        "accuracy_diff": ours["accuracy"] - theirs["accuracy"],
        "tpf_ratio": ours["tpf"] / max(theirs["tpf"], 1e-9),
    }


def agreement(ours: Service, others: Service) -> dict[str, float]:
    """Of the first requests of `ours`: the share of positions with equal tokens, and of requests equal throughout."""
    pairs = [
        (a.result.tokens, b.result.tokens)
        for a, b in zip(ours.served, others.served, strict=False)
        if a.result is not None and b.result is not None
    ]
    longest = sum(max(len(a), len(b)) for a, b in pairs)
    equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    return {
        "tokens": equal / longest if longest else 1.0,
        "requests": sum(a == b for a, b in pairs) / len(pairs) if pairs else 1.0,
        "compared": len(pairs),
    }


def tables_of(values: dict[str, Any]) -> list[Table]:
    runs = {key: values[key] for key in ("blockinfer", "vanilla_llada") if key in values}
    rows = [
        _row(label, {key: run[measure] for key, run in runs.items()}, form)
        for measure, (label, form) in MEASURES.items()
    ]
    rows += [
        _row(f"{label} {part}, s", {key: run[measure][part] for key, run in runs.items()}, "{:.3f}")
        for measure, label in SPREADS.items()
        for part in ("p50", "p90", "p99")
    ]
    tables = [Table(title="Questions answered", headings=_columns(runs), rows=rows)]
    graded = {name: found for name, found in values["sources"].items() if any(r["total"] for r in found.values())}
    if graded:
        marks = [
            {
                "source": name,
                "questions": found["engine"]["total"],
                **{run: f"{r['accuracy']:.1f} % (score {r['score']:.1f})" for run, r in found.items()},
            }
            for name, found in graded.items()
        ]
        headings = {"source": "source", "questions": "graded", "engine": "engine"}
        tables.append(
            Table(
                title="Accuracy by source",
                headings=headings | ({"vanilla": "vanilla"} if "vanilla_llada" in values else {}),
                rows=marks,
                text="Score is F1 where a source has half rights (HotpotQA), else the same as accuracy.",
            )
        )
    if "agreement" in values:
        rows = [
            {
                "pair": pair.replace("_", " "),
                **{k: f"{100 * found[k]:.1f} %" for k in ("tokens", "requests")},
                "n": found["compared"],
            }
            for pair, found in values["agreement"].items()
        ]
        headings = {"pair": "same settings", "tokens": "equal tokens", "requests": "equal answers", "n": "questions"}
        tables.append(Table(title="Agreement", headings=headings, rows=rows))
    return tables


def _columns(runs: dict[str, Any]) -> dict[str, str]:
    return {k: v for k, v in HEADINGS.items() if k == "measure" or k in runs or (k == "ratio" and len(runs) == 2)}


def _row(label: str, found: dict[str, Any], form: str) -> dict[str, Any]:
    row: dict[str, Any] = {"measure": label}
    row |= {key: "–" if value is None else form.format(value) for key, value in found.items()}
    ours, theirs = found.get("blockinfer"), found.get("vanilla_llada")
    if ours is not None and theirs:
        row["ratio"] = f"{ours / theirs:.2f}×"
    return row


def notes_of(values: dict[str, Any]) -> list[str]:
    """The first questions, and what was answered."""
    notes = []
    for number, sample in enumerate(values["samples"]):
        notes.append(
            f"question {number} ({sample['source'] or 'no source'}): …{sample['question'][-150:]!r}, expected {sample['answer']!r}"
        )
        for run in ("engine", "vanilla"):
            if run in sample:
                verdict = {True: "right: ", False: "wrong: ", None: ""}[sample[run].get("correct")]
                notes.append(f"  {run}: {verdict}{sample[run]['text'][:200]!r}")
    return notes
