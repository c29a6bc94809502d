"""What a run through lm-eval came to: a record of each likelihood and each generation, and their sums. Asks no model."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dlm.evaluation.draws import Likelihood
from dlm.evaluation.likelihood import apart

UNDECIDED = 2.0
"""Standard errors by which the best answer of a question must lead."""


class Tally:
    """Records so far: the error and the draws of each likelihood, the forwards and the end of each generation."""

    def __init__(self) -> None:
        self.records: dict[str, list[dict[str, Any]]] = {"likelihood": [], "generation": []}
        self.truncated = 0

    def scored(self, contexts: Sequence[str], found: Sequence[Likelihood]) -> None:
        """A record of each likelihood; of questions with several answers whether the best two are apart."""
        order = sorted(range(len(found)), key=lambda i: (contexts[i], i))
        undecided: dict[int, bool] = {}
        for _, numbers in groupby(order, key=lambda i: contexts[i]):
            group = sorted(numbers, key=lambda i: found[i].nats)
            if len(group) > 1:
                close = not apart(found[group[0]], found[group[1]], errors=UNDECIDED)
                undecided.update(dict.fromkeys(group, close))
        self.records["likelihood"] += [
            {"nats": one.nats, "error": one.error, "draws": one.draws, "undecided": undecided.get(i)}
            for i, one in enumerate(found)
        ]

    def rolled(self, parts: Sequence[Likelihood]) -> float:
        """A record of a text that was scored in parts; its nats."""
        total = sum(part.nats for part in parts)
        error = sum(part.error**2 for part in parts) ** 0.5
        draws = sum(part.draws for part in parts)
        self.records["likelihood"].append({"nats": total, "error": error, "draws": draws, "undecided": None})
        return total

    def written(self, tokens: int, nfe: int, ended: str) -> None:
        """A record of a generation."""
        self.records["generation"].append({"tokens": tokens, "nfe": nfe, "finish_reason": ended})

    def summary(self) -> dict[str, Any]:
        """Errors, draws and undecided questions; forwards, tokens a forward and length stops; truncated contexts."""
        scored, written = self.records["likelihood"], self.records["generation"]
        found: dict[str, Any] = {"truncated_contexts": self.truncated}
        if scored:
            questions = [row["undecided"] for row in scored if row["undecided"] is not None]
            found["likelihood_error"] = sum(row["error"] for row in scored) / len(scored)
            found["likelihood_forwards"] = sum(row["draws"] for row in scored)
            found["undecided"] = sum(questions) / len(questions) if questions else None
        if written:
            nfe, tokens = (sum(row[name] for row in written) for name in ("nfe", "tokens"))
            found |= {"nfe": nfe, "tokens": tokens, "tpf": tokens / max(1, nfe)}
            found["length_stops"] = sum(row["finish_reason"] == "length" for row in written) / len(written)
        return found
