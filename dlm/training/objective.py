"""The loss of a language model: a masking's views through the network, summed by the formulas of dlm.diffusion.loss."""

import torch
from torch import Tensor, nn

from dlm.diffusion.head_loss import head_loss
from dlm.diffusion.loss import token_entropies, token_losses
from dlm.kernels.c.trained import half_product, halves
from dlm.models.transformer import Transformer
from dlm.training.align import Align
from dlm.training.batch import Batch
from dlm.training.masking import masking_of
from dlm.training.masking.view import View
from dlm.training.profile import OFF, SILENT, Ranges
from dlm.training.scoring import in_slices
from dlm.training.sections import ObjectiveConfig


class Objective(nn.Module):
    """Turns a batch into the parts of this process's share of the loss; DDP and FSDP wrap this one module."""

    def __init__(
        self,
        network: Transformer,
        config: ObjectiveConfig,
        seed: int,
        length: int,
        align: Align | None = None,
        ranges: Ranges = SILENT,
        half: bool = False,
    ) -> None:
        super().__init__()
        self.network, self.config, self.length, self.align = network, config, length, align
        self.masking, self.ranges = masking_of(config, network.config, seed), ranges
        self.hidden, self.in_halves = network.hidden, half
        self.names = ("masked", "entropy") if config.entropy_weight else ("masked",)

    def compile_parts(self) -> None:
        """torch.compile the network's body for full sequences, and the loss for any number of predicted tokens.

        The network itself stays as it is, for validation, averaging and saving.
        """
        self.hidden = torch.compile(self.network.hidden, dynamic=False)
        self.token_parts = torch.compile(self.token_parts, dynamic=True)
        if self.align:
            self.align.teacher.compile()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """This batch's share of each part of the step's loss; the loss is their sum. `masked` is in nats a token."""
        with halves() if self.in_halves else OFF:
            return self.parts(batch)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """`forward` in the precision that is set."""
        parts: dict[str, Tensor] = {}
        with self.ranges("views", 2):
            views = self.masking.views(batch)
        with self.ranges("teacher", 2) if self.align else OFF:
            teacher = self.align.teacher.states(batch.input_ids) if self.align else None
        for view in views:
            full = view.targets.shape[1] == self.length
            # The rare truncated step runs eagerly: torch.compile would compile the network anew for its length.
            forward = self.hidden if full else self.network.hidden
            taps = {} if self.align else None
            with self.ranges("network", 2):
                hidden = forward(view.input_ids, view.positions, attention=view.attention, taps=taps)
            with self.ranges("loss", 2):
                for name, value in zip(self.names, self.token_loss(hidden, view), strict=True):
                    _add(parts, name, value)
            if self.align and taps and teacher:
                with self.ranges("align", 2):
                    shifted = self.network.config.shifted_logits
                    _add(parts, "align", self.align.loss(taps, teacher, view, batch, shifted, of=len(views)))
        return parts

    def token_loss(self, hidden: Tensor, view: View) -> Tensor:
        """The parts of the loss, in the order of `names`, over the tokens that the view predicts."""
        states = view.states(hidden, self.network.config.shifted_logits)
        rows = view.predicted.flatten().nonzero().squeeze(1)  # a mask's gradient is slow
        states = states.flatten(0, 1)
        states = states if len(rows) == len(states) else states.index_select(0, rows)
        targets, weight = view.targets.flatten()[rows], view.weight.flatten()[rows]
        if (head := self.fused_head()) is not None:
            never = self.network.config.mask_token_id
            multiply = half_product if self.in_halves else torch.mm
            return head_loss(states, head, targets, weight, never, multiply).unsqueeze(0)
        parts = in_slices(self.token_parts, self.network.config.vocab_size, states, targets)
        return (weight.unsqueeze(-1) * parts).sum(0)  # not `@`, which autocast would do in bf16

    def fused_head(self) -> Tensor | None:
        """The head's weights if the loss can be computed from them: for a plain head on a CPU, without entropy term."""
        network = self.network
        weight = network.embed.weight if network.lm_head is None else network.lm_head.weight
        plain = network.lm_head is None or (type(network.lm_head) is nn.Linear and network.lm_head.bias is None)
        whole = type(weight) is nn.Parameter and weight.ndim == 2  # neither quantised nor one process's share
        return weight if plain and whole and weight.device.type == "cpu" and not self.config.entropy_weight else None

    def token_parts(self, states: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of tokens (n,) from the states that predict them (n, d), and the entropy term if any: (n, parts).

        The entropy term covers tokens that the network predicts right already, to make it surer of them (d3LLM). The
        mask token is never predicted.
        """
        logits = self.network.suppress(self.network.head(states).float(), always=True)
        parts, c = [token_losses(logits, targets)], self.config
        if c.entropy_weight:
            right = logits.argmax(-1) == targets
            parts.append(c.entropy_weight * right * token_entropies(logits, c.entropy_temperature))
        return torch.stack(parts, dim=-1)


def _add(parts: dict[str, Tensor], name: str, value: Tensor) -> None:
    parts[name] = parts.get(name, 0) + value
