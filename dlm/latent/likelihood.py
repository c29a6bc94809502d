"""What a text costs a latent model at most: the decoder's part at little noise, and the flow's between that and noise."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.rng import Purpose, normal, uniform
from dlm.latent.network import LatentNetwork

T_MIN = 0.1
"""Of a model that is still under training."""


@torch.no_grad()
def bound(
    network: LatentNetwork,
    ids: Int[Tensor, "b l"],
    *,
    answer: Bool[Tensor, "b l"] | None = None,
    index: Int[Tensor, " b"] | None = None,
    draws: int = 1,
    seed: int = 0,
    t_min: float | None = None,
) -> Float[Tensor, "b s"]:
    """Draws of an upper bound on -log p of each `answer` given the rest, in nats (PLAID's, arXiv 2305.18619, in our t).

    E CE(decoder(z at t_min)) + ∫ from t_min to 1 of weight(t) E‖v̂ - v‖² dt, summed over channels and latents, t drawn
    evenly in ln t; there is no prior term, since z at t = 1 is noise. Latents that hold no token of the answer are given
    clean; of a latent that holds some, all tokens count. It bounds the SDE in infinitely many steps, and not the ODE.
    """
    device, (b, l) = network.embed.weight.device, ids.shape
    ids = ids.to(device)
    answer = torch.ones_like(ids, dtype=torch.bool) if answer is None else answer.to(device)
    index = torch.arange(b, device=device) if index is None else index.to(device)
    low = t_min or network.shape.t_min or T_MIN
    z = network.encode(ids)
    n, c = z.shape[1:]
    clean = ~network.open_latents(answer)
    asked = answer  # of a perceiver
    if network.shape.kind == "chunk":
        asked = (~clean).repeat_interleave(network.shape.tokens_per_latent, dim=1)[:, :l]
    size = network.shape.block_length or n
    place, block = torch.arange(n, device=device), torch.arange(-(-n // size), device=device)
    shift = uniform(Purpose.BOUND, seed=seed, sample=index[:, None], position=block, token=1)  # (b, m)
    at = torch.full((1, 1, 1), low, device=device)
    found = []
    for s in range(draws):
        t = (math.log(low) * (1 - (shift + s / draws) % 1.0)).exp().float()
        each = t[:, place // size, None]
        address = {"seed": seed, "sample": index[:, None], "position": place, "size": c}
        noise = normal(Purpose.NOISE, step=s, **address)
        shown = torch.where(clean[..., None], z, network.path.noisy(z, noise, each))
        before = None if network.shape.block_length is None else z
        v = network.velocity(shown, t, clean, before=before)
        error = (v - network.path.velocity(z, noise, each)).square().sum(-1).double().masked_fill(clean, 0)
        flow = (error * (network.path.weight(each) * each).squeeze(-1)).sum(-1) * -math.log(low)
        a, _ = network.path.coefficients(at)
        little = network.path.noisy(z, normal(Purpose.DECODER, step=s, **address), at) / a
        logits = network.decode(torch.where(clean[..., None], z, little), l)
        text = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(b, l).double()
        found.append(flow + text.masked_fill(~asked, 0).sum(-1))
    return torch.stack(found, dim=-1).float()


def best_start(
    network: LatentNetwork,
    ids: Int[Tensor, "b l"],
    levels: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4),
    draws: int = 4,
) -> float:
    """The `t_min` of these levels under which text costs least; give it training text."""
    costs = {level: bound(network, ids, draws=draws, t_min=level).double().mean().item() for level in levels}
    return min(costs, key=lambda level: costs[level])
