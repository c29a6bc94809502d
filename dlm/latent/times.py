"""How noise levels are drawn: from evenly spread numbers in (0, 1) to times in (0, 1)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm.latent.config import LatentConfig

BINS, DECAY = 20, 0.98
EDGE = 1e-4
"""Times keep so far from both ends."""


class Times(nn.Module):
    """u ~ U(0, 1) to t. `adaptive` (LDLM) draws t so that its loss rises evenly in u: with density dL/dt.

    L is a running mean of each row's own loss in 20 bins of t, made non-decreasing. What a step adds counts from the
    next step on, so a step's times do not depend on how its rows are cut.
    """

    loss: Tensor
    sums: Tensor

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        self.kind, self.mean, self.std = config.times, config.times_mean, config.times_std
        self.register_buffer("loss", torch.linspace(0.5 / BINS, 1 - 0.5 / BINS, BINS))  # linear: u itself
        self.register_buffer("sums", torch.zeros(2, BINS))  # of losses, and how many: since the last update

    def forward(self, u: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Times of these numbers."""
        if self.kind == "logit_normal":
            u = torch.sigmoid(self.mean + self.std * torch.special.ndtri(u.double()))
        elif self.kind == "adaptive":
            u = self._warped(u)
        return u.float().clamp(EDGE, 1 - EDGE)

    def update(self) -> None:
        """Take in what was noted; once a step, before its times are drawn."""
        total, count = self.sums
        seen = count > 0
        fresh = torch.where(seen, total / count.clamp(min=1), self.loss)
        self.loss.copy_(torch.where(seen, DECAY * self.loss + (1 - DECAY) * fresh, self.loss))
        self.sums.zero_()

    def note(self, t: Float[Tensor, " n"], losses: Float[Tensor, " n"]) -> None:
        """Losses of rows at their times."""
        bins: Int[Tensor, " n"] = (t.flatten() * BINS).long().clamp(0, BINS - 1)
        self.sums[0].index_add_(0, bins, losses.detach().flatten().float())
        self.sums[1].index_add_(0, bins, torch.ones_like(bins, dtype=torch.float32))

    def _warped(self, u: Tensor) -> Tensor:
        """The inverse of t's distribution: between bins' middles L rises linearly, beyond them as fast as beside them."""
        rising = self.loss.cummax(0).values.diff()  # (bins - 1,)
        mass = torch.cat((rising[:1] / 2, rising, rising[-1:] / 2)) + 1e-3 * rising.sum().clamp(min=1e-6) / BINS
        edges = torch.cat((torch.zeros(1), (torch.arange(BINS) + 0.5) / BINS, torch.ones(1))).to(u.device)
        upto = torch.cat((torch.zeros(1, device=mass.device), mass.cumsum(0))) / mass.sum()
        place = torch.searchsorted(upto, u.float().contiguous(), right=True).clamp(1, BINS + 1) - 1
        share = (u.float() - upto[place]) / (upto[place + 1] - upto[place])
        return edges[place] + share.clamp(0, 1) * (edges[place + 1] - edges[place])
