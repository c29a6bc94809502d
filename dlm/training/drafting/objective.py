"""The loss of a draft: what the tokens behind each anchor cost it, the nearest ones counting most."""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm.diffusion.head_loss import head_loss
from dlm.diffusion.loss import token_losses
from dlm.kernels.c.trained import half_product, halves
from dlm.models.draft import Draft
from dlm.training.batch import Batch
from dlm.training.drafting.config import DraftConfig
from dlm.training.drafting.states import TargetStates
from dlm.training.masking.draft import Blocks, DraftMasking
from dlm.training.profile import OFF, SILENT, Ranges
from dlm.training.scoring import in_slices


class DraftObjective(nn.Module):
    """Turns a batch into this process's share of the loss; DDP wraps this one module. The target is no part of it.

    weighting = decay: the mean over all drafted tokens of the step of -log q, the k-th behind its anchor weighing
    exp(-(k-1)/γ). dpace: of each anchor the sum of w_k · -log q_k with w_k = Σ_{j≥k} Π_{i≤j} ((1-α) q_i + α), no gradient
    in w; its mean over anchors. A DFlash 2 draft adds `selector`: the same of its choice among candidates, each after
    the right token, where the right one is among them.
    """

    def __init__(
        self,
        network: Draft,
        masking: DraftMasking,
        config: DraftConfig,
        states: TargetStates,
        ranges: Ranges = SILENT,
        half: bool = False,
    ) -> None:
        super().__init__()
        self.network, self.masking, self.config, self.states, self.ranges = network, masking, config, states, ranges
        self.in_halves = half

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """This batch's share of the step's loss, which is the sum of the parts."""
        with halves() if self.in_halves else OFF:
            return self.parts(batch)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """`forward` in the precision that is set."""
        with self.ranges("views", 2):
            blocks = self.masking.blocks(batch)
        with self.ranges("target", 2):
            features = self.states(batch.input_ids, blocks.context_positions)
        with self.ranges("network", 2):
            rows = (
                blocks.asked.flatten().nonzero().squeeze(1)
            )  # picked by number: the gradient of a mask's pick is slow
            hidden = block_states(self.network, blocks, features).flatten(0, 2).index_select(0, rows)
        with self.ranges("loss", 2):
            targets = blocks.targets.flatten()[rows]
            loss, weight = self.loss(hidden, targets, blocks.asked, max(batch.total, 1e-9))
            parts = {"draft": loss}
            if self.network.candidate_selector is not None:
                previous = torch.cat((blocks.input_ids[:, :: blocks.size, None], blocks.targets[..., :-1]), dim=-1)
                score = partial(self._choice, self.network)
                states = (hidden, torch.stack((targets, previous[blocks.asked]), dim=-1))
                vocabulary = self.network.config.network.vocab_size
                parts["selector"] = (weight * in_slices(score, vocabulary, *states)).sum()
        return parts

    def loss(
        self, hidden: Float[Tensor, "m d"], targets: Int[Tensor, " m"], asked: Bool[Tensor, "b n k"], total: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " m"]]:
        """The weighted nats of the drafted tokens, and their weights, both over `total`."""
        draft, head = self.network, self.network.head_weight()
        places = draft.place(targets)
        if self.config.weighting == "decay" and draft.raw_logits and hidden.device.type == "cpu":
            weight = decayed(asked, self.config)[asked] / total
            multiply = half_product if self.in_halves else torch.mm
            return head_loss(hidden, head, places, weight, multiply=multiply), weight

        def score(states: Tensor, wanted: Tensor) -> Tensor:
            return token_losses(draft.capped(F.linear(states, head)), wanted)

        nats = in_slices(score, len(head), hidden, places)
        weight = self.weights(nats.detach(), asked) / total
        return (weight * nats).sum(), weight

    def weights(self, nats: Float[Tensor, " m"], asked: Bool[Tensor, "b n k"]) -> Float[Tensor, " m"]:
        """What each drafted token counts, before the division by the step's total."""
        if self.config.weighting == "decay":
            return decayed(asked, self.config)[asked]
        right = torch.zeros(asked.shape, device=nats.device).masked_scatter(asked, (-nats).exp().float())
        reached = torch.where(asked, (1 - self.config.smoothing) * right + self.config.smoothing, 0).cumprod(-1)
        return reached.flip(-1).cumsum(-1).flip(-1)[asked]

    @staticmethod
    def _choice(network: Draft, hidden: Float[Tensor, "m d"], tokens: Int[Tensor, "m 2"]) -> Float[Tensor, " m"]:
        """-log of the selector's softmax over a position's candidates at the right one; 0 where that is none of them."""
        selector = network.candidate_selector
        assert selector is not None
        values, candidates = selector.candidates(network.logits(hidden).float())
        scores = selector.scores(tokens[:, 1], hidden, values, candidates).float()
        found = candidates == tokens[:, :1]
        return -(scores.log_softmax(-1) * found).sum(-1)


def decayed(asked: Bool[Tensor, "b n k"], config: DraftConfig) -> Float[Tensor, "b n k"]:
    """exp(-(k-1)/γ) of each drafted token."""
    behind = torch.arange(asked.shape[-1], device=asked.device)
    return torch.exp(-behind / config.decay(asked.shape[-1] + 1)).expand(asked.shape)


def total_of(asked: Bool[Tensor, "b n k"], config: DraftConfig) -> Float[Tensor, ""]:
    """What these drafted tokens add to the number that the step's loss is divided by: their weights, or their anchors."""
    return asked[..., 0].float().sum() if config.weighting == "dpace" else (asked * decayed(asked, config)).sum()


def block_states(draft: Draft, blocks: Blocks, features: Float[Tensor, "b l md"]) -> Float[Tensor, "b n k d"]:
    """The draft's final states of all rows but the anchors'."""
    slides = any(draft.config.windows) or any(draft.config.causal)
    # A sliding layer's sight is a table, which no BlockMask can be joined with.
    allowed = blocks.block_mask() if features.is_cuda and not slides else blocks.allowed()
    hidden = draft(blocks.input_ids, blocks.positions, features, blocks.context_positions, allowed, blocks.size)
    return hidden.unflatten(1, (-1, blocks.size))[:, :, 1:]
