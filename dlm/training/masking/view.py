"""What a masking makes of a batch: forwards, and each token's weight in the loss. Knows no network."""

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.models.attention import AttentionSpec
from dlm.training.batch import Batch


@dataclass(frozen=True)
class View:
    """One forward over a canvas that shows some tokens of the batch and asks for others.

    The loss is the sum over `asked` of weight * cross-entropy. Weights hold all averaging over tokens and over the
    *global* batch, so shares add up to the same loss however a batch is split over forwards and processes.
    """

    input_ids: Int[Tensor, "b m"]
    targets: Int[Tensor, "b l"]
    asked: Bool[Tensor, "b l"]
    weight: Float[Tensor, "b l"]
    attention: AttentionSpec | None = None  # none: the network's own
    positions: Int[Tensor, "b m"] | None = None  # none: 0..m-1
    shifted: bool | None = None  # the token at i is predicted from the state at i-1; none: as the network is

    def states(self, hidden: Float[Tensor, "b m d"], shifted: bool) -> Float[Tensor, "b l d"]:
        """The hidden states that predict the targets; `shifted` says how the network is."""
        return (self.attention or AttentionSpec()).states(hidden, shifted if self.shifted is None else self.shifted)


class Masking(Protocol):
    """Draws views, by random numbers whose addresses are (seed, step, sample, position)."""

    def views(self, batch: Batch) -> list[View]: ...
