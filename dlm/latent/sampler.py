"""From noise to latents: solvers of the flow, guidance, and one block after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.rng import Purpose, normal
from dlm.latent.flow import Path, guided
from dlm.latent.network import LatentNetwork

Velocity = Callable[[Tensor, float], Tensor]
"""(z_t (b, n, c), t) -> dz/dt over the path's speed."""
Renoise = Callable[[], Tensor]
"""Fresh noise, (b, n, c)."""
CHURN = 1.0
"""Solver sde: how far a step goes back towards noise, over the step's own length."""


def euler(velocity: Velocity, z: Tensor, t: float, lower: float, path: Path, noise: Renoise) -> Tensor:
    """One forward; the error of a whole run falls with the number of steps."""
    return z - (t - lower) * path.speed * velocity(z, t)


def heun(velocity: Velocity, z: Tensor, t: float, lower: float, path: Path, noise: Renoise) -> Tensor:
    """Two forwards (one in the last step, which ends at no noise); the error falls with the steps' square."""
    v = velocity(z, t)
    there = z - (t - lower) * path.speed * v
    if lower <= 0:
        return there
    return z - (t - lower) * path.speed * (v + velocity(there, lower)) / 2


def sde(velocity: Velocity, z: Tensor, t: float, lower: float, path: Path, noise: Renoise) -> Tensor:
    """ELF's: a little noise is added, then an Euler step takes away more. The first step begins at noise as it is."""
    if t < 1:
        higher = min(t + CHURN * (t - lower), (1 + t) / 2)
        z = path.renoised(z, noise(), torch.tensor(t), torch.tensor(higher))
        t = higher
    return euler(velocity, z, t, lower, path, noise)


SOLVERS = {"euler": euler, "heun": heun, "sde": sde}


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is sampled: rows of latents of which some are clean, and the addresses of the others' noise."""

    z: Float[Tensor, "b n c"]
    """Read where `clean`."""
    clean: Bool[Tensor, "b n"]
    seed: Int[Tensor, " b"]
    sample: Int[Tensor, " b"]

    def noise(self, purpose: Purpose, step: int) -> Float[Tensor, "b n c"]:
        """Standard normal numbers, the same for a row in any batch."""
        _, n, c = self.z.shape
        place = torch.arange(n, device=self.z.device)
        return normal(purpose, seed=self.seed[:, None], sample=self.sample[:, None], step=step, position=place, size=c)


class Field:
    """The velocity under guidance and self-conditioning; counts its forwards, and keeps where the last one pointed."""

    def __init__(self, network: LatentNetwork, start: Start, scale: float) -> None:
        self.network, self.start, self.scale = network, start, scale
        self.clean, self.known = start.clean, start.z
        self.guess: Tensor | None = None
        self.forwards = 0

    def __call__(self, z: Tensor, t: float) -> Tensor:
        times = torch.full((len(z), 1), t, device=z.device)
        n = z.shape[1]
        v = self.network.velocity(z, times, self.clean[:, :n], guess=self.guess)
        self.forwards += 1
        if self.scale > 0:
            hidden = self.start.clean[:, :n]
            v = guided(
                v, self.network.velocity(z, times, self.clean[:, :n], guess=self.guess, hidden=hidden), self.scale
            )
            self.forwards += 1
        self.guess = torch.where(
            self.clean[:, :n, None], self.known[:, :n], self.network.path.clean(z, v, torch.tensor(t, device=z.device))
        )
        return v


Watch = Callable[[Tensor, range, int, bool], bool]
"""(latents so far (b, n, c), which of them are new, forwards so far, whether they are final) -> whether to stop here."""


@torch.no_grad()
def sample(
    network: LatentNetwork,
    start: Start,
    *,
    steps: int,
    solver: str = "euler",
    scale: float = 0.0,
    watch: Watch | None = None,
) -> Float[Tensor, "b n c"]:
    """Latents of each row, in `steps` steps a block; `watch` sees what each step points to, and at last what came out.

    Blocks that hold clean latents alone cost nothing. Rows do not depend on each other.
    """
    n, path = start.z.shape[1], network.path
    size = network.shape.block_length or n
    field = Field(network, start, scale)
    z = torch.where(start.clean[..., None], start.z, start.noise(Purpose.NOISE, 0))
    for first in range(0, n, size):
        end = min(first + size, n)
        if start.clean[:, first:end].all():
            continue
        z = z.clone()
        here, field.guess = z[:, :end], None
        for step in range(steps):
            t, lower = 1 - step / steps, 1 - (step + 1) / steps
            fresh = partial(start.noise, Purpose.PATH, first * steps + step)
            moved = SOLVERS[solver](field, here, t, lower, path, lambda end=end, fresh=fresh: fresh()[:, :end])
            here = torch.where(field.clean[:, :end, None], field.known[:, :end], moved)
            shown = here if step == steps - 1 else field.guess
            assert shown is not None
            ended = watch is not None and watch(shown, range(first, end), field.forwards, step == steps - 1)
        z[:, :end] = here
        if ended:
            break
        done = torch.arange(n, device=z.device) < end
        field.clean, field.known = start.clean | done, torch.where(done[None, :, None], z, start.z)
    return z


@torch.no_grad()
def one_step(network: LatentNetwork, start: Start) -> Float[Tensor, "b n c"]:
    """VFM: one forward from noise that the adapter chose for these clean latents; the clean ones come out anew, too."""
    mean, log_std = network.start_from(start.z, start.clean)
    noise = mean + log_std.exp() * start.noise(Purpose.NOISE, 0)
    t = torch.ones(len(noise), 1, device=noise.device)
    none = torch.zeros_like(start.clean)
    return network.path.clean(noise, network.velocity(noise, t, none), t[..., None])
