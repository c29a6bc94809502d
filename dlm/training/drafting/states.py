"""The target's states of a batch's text, side by side as a draft reads them: computed now, or read from files."""

from collections.abc import Iterator
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm.models.draft import Draft
from dlm.training.teacher import LiveTeacher, States


class Source(Protocol):
    """A live target, or a folder of its states; see dlm.training.teacher."""

    def states(self, input_ids: Int[Tensor, "b l"], positions: Int[Tensor, "b l"] | None = None) -> States: ...


class TargetStates:
    """Features (b, l, m·d) of the tapped layers of clean text; `source` has them of training rows, `target` of any."""

    def __init__(self, source: Source, draft: Draft, target: LiveTeacher) -> None:
        self.source, self.draft, self.target = source, draft, target

    def __call__(self, input_ids: Int[Tensor, "b l"], positions: Int[Tensor, "b l"]) -> Float[Tensor, "b l md"]:
        """`positions` are those in the documents: where one begins anew, the target reads no further back."""
        return self._read(self.source, input_ids, positions)

    def live(self, input_ids: Int[Tensor, "b l"], positions: Int[Tensor, "b l"]) -> Float[Tensor, "b l md"]:
        """The same of text that is in no folder."""
        return self._read(self.target, input_ids, positions)

    def live_layers(self) -> Iterator[nn.Parameter]:
        """What the target computes with for them."""
        last = max(self.draft.config.target_layer_ids)
        return self.draft.target.network.layers[: last + 1].parameters()

    def _read(self, source: Source, input_ids: Tensor, positions: Tensor) -> Tensor:
        (b, l), device = input_ids.shape, input_ids.device
        read = source.states(input_ids, positions)
        rows = torch.arange(b, device=device).repeat_interleave(l)
        columns = torch.arange(l, device=device).repeat(b)
        taps = {layer: read(layer, rows, columns).view(b, l, -1) for layer in self.draft.config.target_layer_ids}
        return self.draft.features(taps).to(self.draft.fc.weight.dtype)
