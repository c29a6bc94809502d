"""Training objectives: modules that turn a batch into this process's share of the loss. Know no optimiser and no loop."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlm.diffusion.loss import masked_diffusion_loss
from dlm.diffusion.noise import mask_probability, mask_tokens
from dlm.diffusion.rng import Purpose, uniform
from dlm.models.transformer import Transformer
from dlm.training.config import ObjectiveConfig

ROWS_AT_ONCE = 2**26  # logits held at a time: 256 MiB in fp32


@dataclass(frozen=True)
class Batch:
    """Rows of one optimiser step: ids (b, l); where a loss may be taken (b, l); each row's global number (b,)."""

    input_ids: Tensor
    answer: Tensor
    index: Tensor
    step: int
    samples: int  # sequences of the whole step, over all processes

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows start..stop as a batch of the same step."""
        cut = slice(start, stop)
        return Batch(self.input_ids[cut], self.answer[cut], self.index[cut], self.step, self.samples)


class MaskedDiffusion(nn.Module):
    """LLaDA's and MDLM's objective by random masking; with prompt masks it is LLaDA's SFT objective.

    The wrapped network's forward happens in here, so that DDP and FSDP see one module.
    """

    def __init__(self, network: Transformer, config: ObjectiveConfig, mask_id: int, seed: int, length: int) -> None:
        super().__init__()
        self.network, self.config, self.mask_id, self.seed, self.length = network, config, mask_id, seed, length
        self.hidden = network.hidden

    def compile_parts(self) -> None:
        """torch.compile the network's body for full sequences, and the loss for any number of masked tokens.

        The network itself stays as it is, for validation, averaging and saving.
        """
        self.hidden = torch.compile(self.network.hidden, dynamic=False)
        self.rows_loss = torch.compile(self.rows_loss, dynamic=True)

    def forward(self, batch: Batch) -> Tensor:
        """This batch's share of the step's loss, in nats a token."""
        c = self.config
        if batch.answer.all() and c.truncate_probability:
            batch = self._truncate(batch)
        p = mask_probability(batch.index, seed=self.seed, step=batch.step, antithetic=c.antithetic, batch=batch.samples)
        loss = self._pass(batch, p, complementary=False)
        if c.complementary:
            loss = (loss + self._pass(batch, p, complementary=True)) / 2
        return loss

    def _pass(self, batch: Batch, p: Tensor, complementary: bool) -> Tensor:
        c = self.config
        noised = mask_tokens(
            batch.input_ids,
            batch.index,
            self.mask_id,
            seed=self.seed,
            step=batch.step,
            maskable=batch.answer,
            probability=p,
            exact_count=c.exact_count,
            complementary=complementary,
        )
        full = batch.input_ids.shape[1] == self.length
        # The rare truncated step would make torch.compile build the network anew for its length: it runs eagerly.
        hidden = (self.hidden if full else self.network.hidden)(noised.input_ids)
        if self.network.config.shifted_logits:
            hidden = torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)
        lengths = batch.answer.sum(-1)
        total = hidden.new_zeros((), dtype=torch.float32) + 0 * hidden.sum()  # a step may mask nothing
        parts = _slices(noised.masked, ROWS_AT_ONCE // self.network.config.vocab_size)
        for rows in parts:
            given = (hidden[rows], batch.input_ids, rows, noised.weight, lengths, batch.samples)
            # Several parts: each one's logits are computed again in the backward pass instead of kept.
            total = total + (
                self.rows_loss(*given) if len(parts) == 1 else checkpoint(self.rows_loss, *given, use_reentrant=False)
            )
        return total

    def rows_loss(
        self, hidden: Tensor, targets: Tensor, rows: Tensor, weight: Tensor, lengths: Tensor, samples: int
    ) -> Tensor:
        """Loss of the masked tokens in `rows`, from their hidden states (n, d)."""
        logits = self.network.suppress(self.network.head(hidden).float(), always=True)
        return masked_diffusion_loss(
            logits, targets, rows, weight, lengths=lengths, samples=samples, weighting=self.config.weighting
        )

    def _truncate(self, batch: Batch) -> Batch:
        """One step in a hundred sees sequences of a random length (LLaDA, appendix B.1), the same in every process."""
        draw = uniform(Purpose.LENGTH, seed=self.seed, step=batch.step, position=torch.arange(2))
        if draw[0] >= self.config.truncate_probability:
            return batch
        length = 1 + int(draw[1] * batch.input_ids.shape[1])
        return Batch(batch.input_ids[:, :length], batch.answer[:, :length], batch.index, batch.step, batch.samples)


def _slices(masked: Tensor, most: int) -> list[Tensor]:
    """The mask in parts of at most `most` rows, so that a large vocabulary's logits never stand in memory at once."""
    count = int(masked.sum())
    if count <= max(most, 1):
        return [masked] if count else []
    order = masked.flatten().cumsum(0).view_as(masked) - 1
    return [masked & (order >= start) & (order < start + most) for start in range(0, count, most)]


OBJECTIVES = {"masked_diffusion": MaskedDiffusion}
