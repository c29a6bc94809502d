"""Runs of one model and task as points: quality against tokens a forward, the front, and ways of decoding side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlm.evaluation.suite.compare import aup, front

Run = dict[str, Any]
"""A row of the results' `runs`."""
USUAL = {"blocks": "none", "strategy": "block", "cache": "auto", "draft": "none"}
"""What makes decodings of one kind, and its usual values; within a kind rules and their settings differ."""


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
        """Blocks, strategy, cache and draft, as far as they are not the usual ones."""
        return self._words(*USUAL)

    @property
    def base(self) -> str:
        """The way that this one is held against: the same blocks, one at a time, uncached and without a draft."""
        return self._words("blocks")

    def _words(self, *names: str) -> str:
        found = USUAL | self.run.get("way", {})
        named = {"blocks": "blocks of ", "draft": "draft "}
        words = [named.get(n, "") + found[n] for n in names if found[n] != USUAL[n]]
        return ", ".join(words) or "plain"

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
    """Ways of decoding, in the order of the results."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.way, []).append(point)
    return found


def ways(points: Sequence[Point]) -> list[dict[str, Any]]:
    """A row a way: its best quality, its AUP, and how many times its base's TPF it has at equal quality.

    AUP weighs every way by the best quality of all. TPF at equal quality: each point of the base's front is
    compared with the fastest decoding of this way that is at least as good, if there is one.
    """
    found, rows, highest = by_way(points), [], max(point.quality for point in points)
    for way, own in found.items():
        top = max(own, key=lambda point: (point.good, point.tpf))
        row: dict[str, Any] = {"way": way, "decodings": len(own), "best": top.quality, "tpf": top.tpf}
        row["aup"] = aup([(point.tpf, point.quality) for point in best(own)], highest) if top.rises else None
        if way != own[0].base and own[0].base in found:
            base = best(found[own[0].base])
            pairs = [(one, [p.tpf for p in own if p.good >= one.good]) for one in base]
            ratios = [max(rivals) / one.tpf for one, rivals in pairs if rivals]
            row |= {"ratios": [min(ratios), max(ratios)] if ratios else None, "matched": len(ratios), "of": len(base)}
        rows.append(row)
    return rows
