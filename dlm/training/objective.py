"""The module that turns a batch into the parts of this process's loss. Knows no optimiser and no loop."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlm.diffusion.loss import token_losses
from dlm.models.transformer import Transformer
from dlm.training.batch import Batch
from dlm.training.masking import MASKINGS, View
from dlm.training.sections import ObjectiveConfig

LOGITS_AT_ONCE = 2**26  # held at a time: 256 MiB in fp32


class Objective(nn.Module):
    """A masking's views through the network. The forward happens in here, so that DDP and FSDP see one module."""

    def __init__(self, network: Transformer, config: ObjectiveConfig, seed: int, length: int) -> None:
        super().__init__()
        self.network, self.config, self.length = network, config, length
        self.masking = MASKINGS[config.masking](config, network.config, seed)
        self.hidden = network.hidden

    def compile_parts(self) -> None:
        """torch.compile the network's body for full sequences, and the loss for any number of asked tokens.

        The network itself stays as it is, for validation, averaging and saving.
        """
        self.hidden = torch.compile(self.network.hidden, dynamic=False)
        self.rows_loss = torch.compile(self.rows_loss, dynamic=True)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """This batch's share of each part of the step's loss; the loss is their sum. `masked` is in nats a token."""
        parts: dict[str, Tensor] = {}
        for view in self.masking.views(batch):
            full = view.targets.shape[1] == self.length
            # The rare truncated step would make torch.compile build the network anew for its length: it runs eagerly.
            forward = self.hidden if full else self.network.hidden
            hidden = forward(view.input_ids, view.positions, attention=view.attention)
            _add(parts, "masked", self.token_loss(hidden, view))
        return parts

    def token_loss(self, hidden: Tensor, view: View) -> Tensor:
        """Weighted cross-entropy of the view's asked tokens."""
        if self.network.config.shifted_logits if view.shifted is None else view.shifted:
            hidden = torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)
        total = hidden.new_zeros((), dtype=torch.float32) + 0 * hidden.sum()  # a step may ask for nothing
        parts = _slices(view.asked, LOGITS_AT_ONCE // self.network.config.vocab_size)
        for rows in parts:
            given = (hidden[rows], view.targets[rows], view.weight[rows])
            # Several parts: each one's logits are computed again in the backward pass instead of kept.
            total = total + (
                self.rows_loss(*given) if len(parts) == 1 else checkpoint(self.rows_loss, *given, use_reentrant=False)
            )
        return total

    def rows_loss(self, hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Weighted cross-entropy of tokens (n,) from the states that predict them (n, d)."""
        logits = self.network.suppress(self.network.head(hidden).float(), always=True)
        return (token_losses(logits, targets) * weight).sum()


def _add(parts: dict[str, Tensor], name: str, value: Tensor) -> None:
    parts[name] = parts[name] + value if name in parts else value


def _slices(asked: Tensor, most: int) -> list[Tensor]:
    """The mask in parts of at most `most` rows, so that a large vocabulary's logits never stand in memory at once."""
    count = int(asked.sum())
    if count <= max(most, 1):
        return [asked] if count else []
    order = asked.flatten().cumsum(0).view_as(asked) - 1
    return [asked & (order >= start) & (order < start + most) for start in range(0, count, most)]
