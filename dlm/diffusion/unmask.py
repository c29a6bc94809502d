"""Decode rules: which masked positions a step commits. To add one: a class, and a line in `RULES`.

A field with an `Annotated` type and a description is also a setting of [sampler] and `dlm.generate`. The commands list
these in their --help, so this file must import without torch: what computes imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import Field

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

Score = Literal["confidence", "margin", "entropy", "order"]
Confidence = Annotated[float, Field(ge=0, le=1, description="commit at this confidence")]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One decode rule. Rows are independent; every row that has a masked position commits one at least.

    `score` names what a rule reads of each position: a field of `Signals`, or "order", an addressed uniform number.
    Equal scores rank by lower position. `score` may hold anything where `masked` is False.
    """

    score: ClassVar[Score] = "confidence"
    remembers: ClassVar[bool] = False
    """Whether `boost` needs the memory it returned at the step before, zeros at a block's first."""

    def __call__(
        self, score: Float[Tensor, "b l"], masked: Bool[Tensor, "b l"], quota: Int[Tensor, " b"]
    ) -> Bool[Tensor, "b l"]:
        """The positions to commit; `quota` is the schedule's number for this step, which some rules follow."""
        raise NotImplementedError

    def boost(
        self, logits: Float[Tensor, "n v"], memory: Float[Tensor, "n v"], mask_id: int | None
    ) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
        """Logits and memory changed before a token is chosen, for rules that remember."""
        return logits, memory

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """The fields that are settings of [sampler] too: their types, with limits and description, by name."""
        types = get_type_hints(cls, include_extras=True, localns={"ClassVar": ClassVar})
        return {name: kind for name, kind in types.items() if hasattr(kind, "__metadata__")}


@dataclass(frozen=True, kw_only=True)
class LowConfidence(Rule):
    """Commit the `quota` most confident positions: LLaDA's `low_confidence` remasking (arXiv 2502.09992)."""

    def __call__(self, score: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
        return _first(score, masked, quota)


@dataclass(frozen=True, kw_only=True)
class Random(LowConfidence):
    """Commit `quota` random positions: LLaDA's `random` remasking."""

    score: ClassVar[Score] = "order"


@dataclass(frozen=True, kw_only=True)
class Margin(LowConfidence):
    """Commit the `quota` positions whose best token is furthest ahead of the runner-up (arXiv 2502.06768)."""

    score: ClassVar[Score] = "margin"


@dataclass(frozen=True, kw_only=True)
class Entropy(Rule):
    """Commit the `quota` positions of lowest entropy: Dream's `entropy`."""

    score: ClassVar[Score] = "entropy"

    def __call__(self, score: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
        return _first(-score, masked, quota)


@dataclass(frozen=True, kw_only=True)
class Threshold(Rule):
    """Commit every position whose confidence reaches `threshold`, and always the best: Fast-dLLM (arXiv 2505.22618)."""

    threshold: Confidence = 0.9

    def __call__(self, score: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
        return (score >= self.threshold) & masked | best(score, masked)


@dataclass(frozen=True, kw_only=True)
class Factor(Rule):
    """Commit the n most confident while the n-th has c >= 1 - factor / (n + 1); the first always: Fast-dLLM."""

    factor: Annotated[float, Field(gt=0, description="f; the n-th most confident needs 1 - f / (n + 1)")] = 1.0

    def __call__(self, score: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
        import torch

        ordered, order = _ranked(score, masked)
        n = torch.arange(1, score.shape[-1] + 1, device=score.device, dtype=torch.float64)
        accepted = ordered >= (1 - self.factor / (n + 1)).to(score.dtype)
        return _unsorted(accepted, order) & masked | best(score, masked)


@dataclass(frozen=True, kw_only=True)
class EntropyBound(Rule):
    """Commit in order of entropy while those before sum to `gamma` nats at most: EB-Sampler (arXiv 2505.24857)."""

    score: ClassVar[Score] = "entropy"
    gamma: Annotated[float, Field(ge=0, description="entropy (nats) a step may commit")] = 0.1

    def __call__(self, score: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
        import torch

        ordered, order = _ranked(-score, masked)
        total = (-ordered).double().masked_fill(ordered.isneginf(), 0.0).cumsum(-1)
        before = torch.cat((torch.zeros_like(total[:, :1]), total[:, :-1]), dim=-1)
        return _unsorted(before <= self.gamma, order) & masked


@dataclass(frozen=True, kw_only=True)
class EntropyThreshold(Rule):
    """Commit every position of at most `entropy_threshold` nats, and always the surest: d3LLM (arXiv 2601.07568)."""

    score: ClassVar[Score] = "entropy"
    entropy_threshold: Annotated[float, Field(ge=0, description="commit up to this entropy (nats)")] = 0.5

    def __call__(self, score: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
        return (score <= self.entropy_threshold) & masked | best(-score, masked)


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Rule):
    """Commit c > `threshold`, and in each run of masks its best if c > `tau_low`: dInfer (arXiv 2510.08666)."""

    threshold: Confidence = 0.9
    tau_low: Annotated[float, Field(ge=0, le=1, description="confidence the best of each run of masks needs")] = 0.5

    def __call__(self, score: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
        import torch

        b, length = masked.shape
        score = score.masked_fill(~masked, float("-inf"))
        before = torch.cat((torch.zeros_like(masked[:, :1]), masked[:, :-1]), dim=-1)
        run = (masked & ~before).long().cumsum(-1)  # (b, l), runs of a row counted from 1
        highest = score.new_full((b, length + 1), float("-inf")).scatter_reduce(-1, run, score, "amax")
        position = torch.arange(length, device=score.device).expand(b, length)
        at_best = masked & (score == highest.gather(-1, run))
        first = torch.full((b, length + 1), length, device=score.device).scatter_reduce(
            -1, run, position.masked_fill(~at_best, length), "amin"
        )
        leads = at_best & (position == first.gather(-1, run))
        return masked & (score > self.threshold) | leads & (score > self.tau_low) | best(score, masked)


@dataclass(frozen=True, kw_only=True)
class Credit(Threshold):
    """`Threshold` on logits raised where a token was the favourite before: dInfer's credit decoding.

    Each position of the block remembers M (v,): M <- decay M, M[argmax p] += max p ^ power; logits += weight log(1 + M).
    """

    remembers: ClassVar[bool] = True
    weight: float = 0.7
    decay: float = 0.8
    power: float = 0.2

    def boost(self, logits: Tensor, memory: Tensor, mask_id: int | None) -> tuple[Tensor, Tensor]:
        import torch

        logits = logits.float()
        p = logits.softmax(-1)
        if mask_id is not None:
            p = p.index_fill(-1, torch.full((1,), mask_id, device=p.device), -1.0)
        favourite = p.argmax(-1, keepdim=True)
        earned = p.gather(-1, favourite).clamp(min=0) ** self.power
        memory = (memory * self.decay).scatter_add(-1, favourite, earned)
        return logits + self.weight * torch.log1p(memory), memory


RULES: dict[str, type[Rule]] = {
    "low_confidence": LowConfidence,
    "random": Random,
    "margin": Margin,
    "entropy": Entropy,
    "threshold": Threshold,
    "factor": Factor,
    "entropy_bound": EntropyBound,
    "entropy_threshold": EntropyThreshold,
    "hierarchical": Hierarchical,
    "credit": Credit,
}


def schedule(masked: int, steps: int, step: int) -> int:
    """How many of the `masked` positions of a block its `step`-th (from 0) of `steps` commits: LLaDA's even shares.

    masked // steps, and one more in the first masked % steps; at least one, also for positions that were masked again
    after the last step.
    """
    return max(1, masked // steps + (step < masked % steps))


def _ranked(score: Float[Tensor, "b l"], masked: Bool[Tensor, "b l"]) -> tuple[Tensor, Tensor]:
    """Scores from best to worst and their positions; equals by position, unmasked ones last as -inf."""
    return score.masked_fill(~masked, float("-inf")).sort(dim=-1, descending=True, stable=True)


def _first(score: Float[Tensor, "b l"], masked: Bool[Tensor, "b l"], count: Int[Tensor, " b"]) -> Bool[Tensor, "b l"]:
    """The `count` best of each row."""
    import torch

    if score.device.type == "cpu" and score.dtype == torch.float32:  # numpy's calls take a third of torch's time
        return _first_on_host(score.numpy(), masked.numpy(), count.tolist())
    _, order = _ranked(score, masked)
    taken = torch.arange(score.shape[-1], device=score.device) < count[:, None]
    return torch.zeros_like(masked).scatter(-1, order, taken) & masked


def _first_on_host(score: np.ndarray, masked: np.ndarray, count: list[int]) -> Tensor:
    import numpy as np
    import torch

    order = np.argsort(np.where(masked, -score, np.inf), axis=-1, kind="stable")
    taken = np.zeros_like(masked)
    for row, positions, most in zip(taken, order, count, strict=True):
        row[positions[:most]] = True
    return torch.from_numpy(taken & masked)


def best(score: Float[Tensor, "b l"], masked: Bool[Tensor, "b l"]) -> Bool[Tensor, "b l"]:
    """The best of each row."""
    first = score.masked_fill(~masked, float("-inf")).argmax(-1, keepdim=True)
    return masked.new_zeros(masked.shape).scatter(-1, first, True) & masked


def _unsorted(ranked: Bool[Tensor, "b l"], order: Int[Tensor, "b l"]) -> Bool[Tensor, "b l"]:
    """Values by rank put back in the order of positions."""
    return ranked.new_zeros(ranked.shape).scatter(-1, order, ranked)
