"""A share of successes and how far chance may have moved it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass(frozen=True)
class Rate:
    """`hits` of `total` independent trials."""

    hits: int
    total: int

    def __post_init__(self) -> None:
        assert 0 <= self.hits <= self.total, self

    @classmethod
    def of(cls, outcomes: Iterable[bool]) -> "Rate":
        """Counted from single outcomes."""
        counted = [bool(outcome) for outcome in outcomes]
        return cls(sum(counted), len(counted))

    @property
    def value(self) -> float | None:
        """The share itself; None of no trials."""
        return self.hits / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval at 95 % (Wilson 1927): right also near 0 and 1, where the usual one is not."""
        if not self.total:
            return 0.0, 1.0
        n, p, z = self.total, self.hits / self.total, Z95
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low = 0.0 if self.hits == 0 else centre - half  # exactly so; the sum above leaves a rounding error
        high = 1.0 if self.hits == n else centre + half
        return low, high

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.1f}–{100 * high:.1f})"

    def to_dict(self) -> dict[str, float | int | None]:
        """Plain values for JSON."""
        low, high = self.interval
        return {"hits": self.hits, "total": self.total, "rate": self.value, "low": low, "high": high}
