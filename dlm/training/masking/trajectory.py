"""Masks as a decoder sees them: a block partly filled in its recorded order, everything behind it masked."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.loss import token_weights
from dlm.diffusion.rng import Purpose, uniform
from dlm.models.config import ModelConfig
from dlm.training.batch import Batch
from dlm.training.masking.view import View
from dlm.training.sections import ObjectiveConfig


class TrajectoryMasking:
    """d3LLM (arXiv 2601.07568): predicts the tokens that a block still lacked at a point of its trajectory.

    A block is `block_length` consecutive tokens of what was decoded, counted from the first; of a block-causal network,
    those between two multiples of `block_length`, as its attention has them. Each sequence draws one of its blocks, and
    a ratio r ~ U(low, max_mask_ratio): the point is the last one at which at least a share r of the block, and a token
    at least, was masked. Curricula, linear over the run: `low` from min_mask_ratio to max_mask_ratio, the block from
    block_length to max_block_length. Each pass counts the mean over its predicted tokens.
    """

    def __init__(self, config: ObjectiveConfig, model: ModelConfig, seed: int) -> None:
        assert model.mask_token_id is not None and config.block_length is not None
        self.config, self.mask_id, self.seed = config, model.mask_token_id, seed
        self.work = (2.0, 0.0) if config.complementary else (1.0, 0.0)  # a block's few predicted tokens are not counted
        self.aligned = model.attention == "block_causal"
        self.block_length, self.max_block_length = config.block_length, config.max_block_length or config.block_length

    def views(self, batch: Batch) -> list[View]:
        """One view, or two: the second predicts the tokens of the block that the first one shows."""
        assert batch.order is not None, "trajectories come with data.source = traces"
        block, masked, later = self.draw(batch)
        views = []
        for predicted in (masked, block & ~masked) if self.config.complementary else (masked,):
            canvas = torch.where(predicted | later, self.mask_id, batch.input_ids)
            one = torch.ones_like(predicted[:, :1], dtype=torch.float32)
            views.append(View(canvas, batch.input_ids, predicted, token_weights(one, predicted, batch.samples)))
        return views

    def draw(self, batch: Batch) -> tuple[Bool[Tensor, "b l"], Bool[Tensor, "b l"], Bool[Tensor, "b l"]]:
        """For each sequence: its block, the positions of it that were masked, and all positions after it. Positions
        that were never decoded, such as padding, count as after every block: decoders see masks there.
        """
        assert batch.order is not None
        order = batch.order
        decoded = batch.answer & (order >= 0)
        numbers = uniform(
            Purpose.TIME,
            seed=self.seed,
            sample=batch.index[:, None],
            step=batch.step,
            position=torch.arange(2, device=order.device),
        )
        place, ratio = numbers[:, :1], numbers[:, 1:]  # (b, 1)
        size = round(self.block_length + batch.progress * (self.max_block_length - self.block_length))
        at = self._count(decoded, size)
        blocks = at.masked_fill(~decoded, -1).amax(-1, keepdim=True).div(size, rounding_mode="floor") + 1
        first = (place * blocks).long() * size
        block = decoded & (at >= first) & (at < first + size)
        low = self.config.min_mask_ratio + batch.progress * (self.config.max_mask_ratio - self.config.min_mask_ratio)
        share = low + ratio * (self.config.max_mask_ratio - low)
        return block, _still_masked(order, block, share), batch.answer & ((at >= first + size) | (order < 0))

    def _count(self, decoded: Bool[Tensor, "b l"], size: int) -> Int[Tensor, "b l"]:
        """Each position's place in the run of blocks."""
        if not self.aligned:
            return decoded.long().cumsum(-1) - 1
        first = decoded.long().argmax(-1, keepdim=True)
        return torch.arange(decoded.shape[1], device=decoded.device) - first // size * size


def _still_masked(
    order: Int[Tensor, "b l"], block: Bool[Tensor, "b l"], share: Float[Tensor, "b 1"]
) -> Bool[Tensor, "b l"]:
    """The block's masks at the last point of its trajectory that has at least this share of them, and one at least."""
    fewest = (share * block.sum(-1, keepdim=True)).ceil().long().clamp(min=1)
    latest = order.masked_fill(~block, -1).sort(-1, descending=True).values
    return block & (order >= latest.gather(-1, fewest - 1))
