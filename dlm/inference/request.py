"""What goes into a sampler and what comes out: requests, steps and generations. Knows nothing of how they are sampled."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jaxtyping import Bool, Int
from torch import Tensor

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to generate or to fill, as token ids."""

    request_id: str
    ids: tuple[int, ...]
    """The prompt; where it is to be filled, with mask ids in its holes."""
    gen_length: int = 0
    """Tokens to add after the prompt, at most; 0 for infilling."""
    holes: tuple[range, ...] = ()
    """Positions to fill."""
    pieces: tuple[str, ...] | None = None
    """The text between the holes, where the prompt came as text."""
    seed: int = 0
    sample: int = 0
    """Its number among the samples asked of one prompt: part of the address of its random numbers."""

    @property
    def prompt_length(self) -> int:
        """Tokens given before the first generated one."""
        return self.holes[0].start if self.holes else len(self.ids)


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """What one forward changed; a row is a request that is still running. Tensors are on the CPU."""

    step: int
    """From 0; every live request has taken part in each step so far."""
    nfe: int
    """Forward passes so far (guidance costs two a step)."""
    request_ids: tuple[str, ...]
    prompt_lengths: tuple[int, ...]
    """Tokens that were given before the first generated one."""
    lengths: tuple[int, ...]
    """Positions of each row of `canvas` that are real; the rest is padding."""
    canvas: Int[Tensor, "b l"]
    """Token ids after the step."""
    committed: Bool[Tensor, "b l"]
    """Masks that became tokens."""
    edited: Bool[Tensor, "b l"]
    """Tokens that were replaced by others."""
    remasked: Bool[Tensor, "b l"]
    """Tokens that became masks again."""
    refused: Int[Tensor, "b l"] | None = None
    """Drafted tokens that the step did not take; -1 elsewhere. None where nothing was drafted."""
    drafted: Bool[Tensor, "b l"] | None = None
    """Of those committed, the drafted ones. None where nothing was drafted."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished request.

    text: What was generated; for infilling the whole text with its holes filled.
    tokens: Generated ids only, up to and including end-of-text or the token that completed a stop string (`text` ends
        before that string, which may be within a token); for infilling those of all holes in order.
    nfe: Forward passes spent on this request.
    tpf: Generated tokens a forward pass.
    finish_reason: "stop": it wrote end-of-text or a stop string; "length": it filled what it was given; "interrupted":
        Ctrl-C came before its end.
    request_id, sample: Whose result it is: `sample` is its number among the samples asked of one prompt.
    holes: For infilling: the filled pieces in order.
    steps: The step, from 0, at which each token was committed (the last time, if it was masked again).
    accepted: With a draft: the tokens that each verification added, the target's own counted, the last clipped to the
        text. The first token is the prompt's forward's, and not counted.
    drafted: With a draft: the tokens that each verification checked.
    tau: With a draft: the mean of `accepted`; 0 where nothing was verified.
    target_nfe, draft_nfe: With a draft: forwards of either; `nfe` and `tpf` count the target's.
    attempts: With a check: how often the holes were filled; `nfe` counts all of them.
    passed: With a check: whether the text passes it.
    """

    text: str
    tokens: list[int]
    nfe: int
    tpf: float
    finish_reason: FinishReason
    request_id: str
    sample: int = 0
    holes: list[str] | None = None
    steps: list[int] = field(default_factory=list)
    accepted: list[int] | None = None
    drafted: list[int] | None = None
    tau: float | None = None
    target_nfe: int | None = None
    draft_nfe: int | None = None
    attempts: int | None = None
    passed: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while requests were under way. `results` are those that had begun, in the order of their prompts.

    The `finish_reason` of unfinished ones is "interrupted": their text shows what was not decided yet as ░, and their
    tokens hold the mask there.
    """

    def __init__(self, results: list[Generation]) -> None:
        super().__init__()
        self.results = results


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished canvas, before its tokens are made text."""

    ids: Sequence[int]
    when: Sequence[int]
    nfe: int
