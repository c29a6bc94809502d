"""The flow between latents and noise, as pure functions: paths, targets, solver steps, weights of the bound. t = 1 is noise."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Coefficients = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Path:
    """z_t = a(t) z + b(t) ε. The denoiser's target v is the path's velocity over `speed`.

    linear (rectified flow): a = 1 - t, b = t, v = ε - z. vp (LD4LG): a = cos(πt/2), b = sin(πt/2), v = a ε - b z.
    """

    coefficients: Coefficients
    speed: float
    straight: bool

    def noisy(self, z: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """z_t; `t` broadcasts."""
        a, b = self.coefficients(t)
        return a * z + b * noise

    def velocity(self, z: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the denoiser is to say at z_t."""
        if self.straight:
            return noise - z
        a, b = self.coefficients(t)
        return a * noise - b * z

    def clean(self, z_t: Tensor, v: Tensor, t: Tensor) -> Tensor:
        """The z that a velocity at z_t points to."""
        a, b = self.coefficients(t)
        return z_t - b * v if self.straight else a * z_t - b * v

    def weight(self, t: Tensor) -> Tensor:
        """What ‖v̂ - v‖² counts in the bound: -½ SNR'(t) of ‖ẑ - z‖², which is speed · a / b of it."""
        a, b = self.coefficients(t)
        return self.speed * a / b

    def renoised(self, z_t: Tensor, noise: Tensor, t: Tensor, higher: Tensor) -> Tensor:
        """A draw of z at a `higher` time than t given z_t."""
        (a, b), (a_high, b_high) = self.coefficients(t), self.coefficients(higher)
        ratio = a_high / a
        return ratio * z_t + (b_high**2 - (ratio * b) ** 2).clamp(min=0).sqrt() * noise


PATHS = {
    "linear": Path(lambda t: (1 - t, t), 1.0, True),
    "vp": Path(lambda t: (torch.cos(math.pi / 2 * t), torch.sin(math.pi / 2 * t)), math.pi / 2, False),
}


def kl(
    mean: Float[Tensor, "... c"],
    log_var: Float[Tensor, "... c"] | float = 0.0,
    other_mean: Float[Tensor, "... c"] | float = 0.0,
    other_log_var: Float[Tensor, "... c"] | float = 0.0,
    free: float = 0.0,
) -> Float[Tensor, "..."]:
    """KL of two normal distributions summed over channels, each counted as `free` nats at least (free bits, as in CALM).

    The other one is standard normal unless given.
    """
    ratio = torch.as_tensor(log_var, device=mean.device) - other_log_var
    nats = 0.5 * ((mean - other_mean) ** 2 * torch.as_tensor(-other_log_var).exp() + ratio.exp() - 1 - ratio)
    return nats.clamp(min=free).sum(-1)


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance of velocities, u + (s + 1)(c - u), as LLaDA counts s."""
    return unconditional + (scale + 1) * (conditional - unconditional)


def embedded(t: Float[Tensor, "..."], size: int = 256) -> Float[Tensor, "... e"]:
    """Cosines and sines of 1000 t at frequencies from 1 down to 1/10000 (DiT); t is never rounded."""
    frequencies = torch.exp(-math.log(10_000) * torch.arange(size // 2, device=t.device) / (size // 2))
    angle = 1000 * t.float().unsqueeze(-1) * frequencies
    return torch.cat((angle.cos(), angle.sin()), dim=-1)
