"""`View`, what a masking makes of a batch: one forward, the positions it predicts, and their weights in the loss."""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.errors import UserError
from dlm.models.attention import AttentionSpec
from dlm.models.config import ModelConfig
from dlm.training.batch import Batch


@dataclass(frozen=True)
class View:
    """One forward: the canvas that the network is shown, and the tokens that it has to predict.

    The loss is the sum over `predicted` of weight * cross-entropy. Weights hold all averaging over tokens and over the
    *global* batch, so shares add up to the same loss however a batch is split over forwards and processes.
    """

    input_ids: Int[Tensor, "b m"]
    targets: Int[Tensor, "b l"]
    predicted: Bool[Tensor, "b l"]
    weight: Float[Tensor, "b l"]
    attention: AttentionSpec | None = None  # none: the network's own
    positions: Int[Tensor, "b m"] | None = None  # none: 0..m-1
    shifted: bool | None = None  # the token at i is predicted from the state at i-1; none: as the network is

    def states(self, hidden: Float[Tensor, "b m d"], shifted: bool) -> Float[Tensor, "b l d"]:
        """The hidden states that predict the targets; `shifted` says how the network is."""
        return (self.attention or AttentionSpec()).states(hidden, shifted if self.shifted is None else self.shifted)


def end_of(model: ModelConfig) -> int:
    """The id of end-of-text, where documents begin or end."""
    if model.eos_token_id is None:
        raise UserError(
            "objective.masking = causal, and documents = apart, tell documents by end-of-text, and the model has none: "
            "set model.eos_token_id, or take a tokenizer that has one"
        )
    return model.eos_token_id


def documents(ids: Int[Tensor, "b l"], eos_id: int, opens: bool) -> Int[Tensor, "b l"]:
    """Each token's position in its own document: an end-of-text closes one or, where it `opens`, is the next one's first."""
    ends = ids == eos_id
    first = ends if opens else torch.cat((torch.zeros_like(ends[:, :1]), ends[:, :-1]), dim=1)
    at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return at - at.masked_fill(~first, 0).cummax(-1).values


class Masking(Protocol):
    """Draws views, by random numbers whose addresses are (seed, step, sample, position).

    Made as cls(config: ObjectiveConfig, model: ModelConfig, seed: int); see MASKINGS.
    """

    work: tuple[float, float]
    """Positions that go through the network, and positions that are predicted, on average for each token of a batch."""

    def views(self, batch: Batch) -> list[View]: ...
