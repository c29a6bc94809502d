"""Runs of one model and task as points: quality against tokens a forward, the front, and ways of decoding side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlm.evaluation.suite.compare import aup, front

Run = dict[str, Any]
"""A row of the results' `runs`."""
WAY = ("strategy", "cache", "draft")
"""What makes decodings of one kind; within it rules and their settings differ."""
USUAL = {"strategy": "block", "cache": "auto", "draft": "none"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run's quality and speed."""

    run: Run
    tpf: float
    quality: float
    low: float
    high: float
    """Ends of the interval at 95 %."""
    rises: bool
    """Whether more is better."""

    @property
    def good(self) -> float:
        """The quality, turned so that more is better."""
        return self.quality if self.rises else -self.quality

    @property
    def way(self) -> str:
        """Strategy, cache and draft, as far as they are not the usual ones."""
        found = self.run.get("way", {})
        words = [found[name] for name in WAY if found.get(name, USUAL[name]) != USUAL[name]]
        return " ".join(words) or "block"

    @property
    def rule(self) -> str:
        return self.run.get("way", {}).get("rule") or self.run["decoding"].split()[0]


def quality_of(run: Run) -> tuple[float, float, float] | None:
    """A run's main figure with the ends of its interval; None where it has none."""
    metrics = run["metrics"]
    found = metrics.get(run["measure"])
    if isinstance(found, dict) and found.get("rate") is not None:
        return found["rate"], found["low"], found["high"]
    found = next((value for name, value in metrics.items() if name.startswith("pass@")), None)
    if isinstance(found, dict):
        error = 1.96 * (found["error"] or 0.0)
        return found["rate"], max(0.0, found["rate"] - error), min(1.0, found["rate"] + error)
    if "bits_per_byte" in metrics:
        value, error = metrics["bits_per_byte"], 1.96 * (metrics.get("bits_error") or 0.0)
        return value, value - error, value + error
    return None


def groups(values: dict[str, Any]) -> list[list[Point]]:
    """The points of each model and task."""
    found: dict[tuple[str, str], list[Point]] = {}
    for run in values["runs"]:
        tpf, quality = run["metrics"].get("tpf"), quality_of(run)
        if tpf and quality is not None:
            value, low, high = quality
            point = Point(run=run, tpf=tpf, quality=value, low=low, high=high, rises=run["measure"] != "bits_per_byte")
            found.setdefault((run["model"], run["task"]), []).append(point)
    return list(found.values())


def best(points: Sequence[Point]) -> list[Point]:
    """Those that no other equals in both TPF and quality and exceeds in one, by rising TPF."""
    found = [points[i] for i in front([(point.tpf, point.good) for point in points])]
    return sorted(found, key=lambda point: point.tpf)


def by_way(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Ways of decoding in the order of the results; the first is what the others are held against."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.way, []).append(point)
    return found


def ways(points: Sequence[Point]) -> list[dict[str, Any]]:
    """A row a way: its best quality, its AUP, and how many times the first way's TPF it has at equal quality.

    For each point of the first way's front: the fastest of this way's that is no worse, where there is one.
    """
    found, rows = by_way(points), []
    first = best(next(iter(found.values()), []))
    for way, own in found.items():
        top = max(own, key=lambda point: (point.good, point.tpf))
        row: dict[str, Any] = {"way": way, "decodings": len(own), "best": top.quality, "tpf": top.tpf}
        row["aup"] = aup([(point.tpf, point.quality) for point in best(own)]) if top.rises else None
        if own is not found[next(iter(found))]:
            pairs = [(one, [p.tpf for p in own if p.good >= one.good]) for one in first]
            ratios = [max(rivals) / one.tpf for one, rivals in pairs if rivals]
            row |= {"ratios": [min(ratios), max(ratios)] if ratios else None, "matched": len(ratios), "of": len(first)}
        rows.append(row)
    return rows
