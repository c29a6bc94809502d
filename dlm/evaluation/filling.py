"""One way of filling masks, and batches of canvases filled that way by `dlm.infill`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError

if TYPE_CHECKING:
    from dlm.inference.request import Generation
    from dlm.models.lm import LM

SCHEDULED = ("low_confidence", "random", "margin", "entropy")
"""Rules that commit a number of tokens set beforehand; the others decide by what they see."""

Tick = Callable[[int], None]  # canvases just finished


@dataclass(frozen=True, kw_only=True)
class Filling:
    """A rule with its settings; `tokens_per_step` is for the scheduled rules only."""

    rule: str
    tokens_per_step: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """Further settings of `dlm.infill`, such as threshold or block_length."""
    name: str | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_step < 1:
            raise UserError(f"{self.tokens_per_step=}: a step commits at least one token")
        if self.tokens_per_step > 1 and self.rule not in SCHEDULED:
            raise UserError(
                f"tokens_per_step = {self.tokens_per_step} with rule {self.rule!r}, which decides itself how many; "
                f"rules with a schedule: {', '.join(SCHEDULED)}"
            )

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.name is not None:
            return self.name
        words = [self.rule, *(f"{key}={value}" for key, value in self.options.items())]
        if self.rule in SCHEDULED:
            words.append(f"{self.tokens_per_step}/step")
        return " ".join(words)

    def steps(self, masked: int) -> int:
        """Denoising steps for a canvas of so many masks."""
        return max(1, -(-masked // self.tokens_per_step))


def fill(
    lm: "LM",
    canvases: Sequence[Sequence[int]],
    filling: Filling,
    *,
    batch_size: int = 64,
    seed: int = 0,
    tick: Tick | None = None,
) -> "list[Generation]":
    """Fill the mask ids of each canvas; results in the order of `canvases`, whatever shares a batch.

    With one token a step, any number of steps from the masks on means the same, so all take the largest; with more, only
    canvases of equal steps go together.
    """
    from dlm.inference.generation import infill

    steps = [filling.steps(list(canvas).count(lm.require_mask_id())) for canvas in canvases]
    if filling.tokens_per_step == 1:
        steps = [max(steps)] * len(steps) if steps else []
    results: dict[int, Generation] = {}
    for count in sorted(set(steps)):
        alike = sorted((i for i, own in enumerate(steps) if own == count), key=lambda i: len(canvases[i]))
        for start in range(0, len(alike), batch_size):
            chosen = alike[start : start + batch_size]
            prompts, settings = [list(canvases[i]) for i in chosen], {"steps": count, "seed": seed, **filling.options}
            filled = infill(lm, prompts, rule=filling.rule, batch_size=batch_size, **settings)
            results.update(zip(chosen, filled, strict=True))
            if tick is not None:
                tick(len(chosen))
    return [results[i] for i in range(len(canvases))]
