"""The denoiser: a Transformer over latents whose layers are turned by their noise level (DiT, AdaLN-zero)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm.latent.flow import embedded
from dlm.models.attention import Attend, Attention, AttentionSpec, RMSNorm, dense_attend
from dlm.models.config import ModelConfig
from dlm.models.rope import rope_frequencies, rope_table
from dlm.models.transformer import MLP

TIME_SIZE = 256


class Modulated(nn.Module):
    """x + g · f(norm(x)(1 + a) + s) for attention and feed-forward; a, s and g follow from the noise level, and begin as 0."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attn_norm, self.attn = RMSNorm(d, eps), Attention(config, layer)
        self.mlp_norm, self.mlp = RMSNorm(d, eps), MLP(config)
        self.modulation = nn.Linear(d, 6 * d)

    def forward(self, x: Float[Tensor, "b n d"], level: Tensor, which: Int[Tensor, "b n"], attend: Attend) -> Tensor:
        parts = of_rows(self.modulation(level), which).chunk(6, dim=-1)
        x = x + parts[2] * self.attn(self.attn_norm(x) * (1 + parts[0]) + parts[1], attend)
        return x + parts[5] * self.mlp(self.mlp_norm(x) * (1 + parts[3]) + parts[4])


class Denoiser(nn.Module):
    """Noisy latents to velocities.

    Latents of one text may have several noise levels: `times` (b, m) lists them and `which` (b, n) says whose is whose.
    A clean latent, of a prompt or an earlier block, is one at time 0; a hidden one is 0 at time 1.
    """

    def __init__(self, config: ModelConfig, inputs: int, outputs: int, latents: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = config
        learned = config.position_embedding == "learned"
        self.rope = None if learned else rope_frequencies(config)
        self.positions = nn.Embedding(latents, d) if learned else None
        self.enter = nn.Linear(inputs, d)
        self.time = nn.Sequential(nn.Linear(TIME_SIZE, d), nn.SiLU(), nn.Linear(d, d))
        self.layers = nn.ModuleList(Modulated(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.modulation = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, outputs)

    def forward(
        self,
        z: Float[Tensor, "b n i"],
        times: Float[Tensor, "b m"],
        which: Int[Tensor, "b n"],
        attention: AttentionSpec,
    ) -> Float[Tensor, "b n c"]:
        """Under `two_stream` attention z is [noisy | clean], and the velocities are those of the noisy half."""
        both = attention.kind == "two_stream"
        n = z.shape[1] // 2 if both else z.shape[1]
        place = torch.arange(n, device=z.device).repeat(1 + both).expand(z.shape[:2])
        x = self.enter(z)
        rope = None
        if self.positions is not None:
            x = x + self.positions(place)
        elif self.rope is not None:
            frequencies, gain = self.rope
            rope = rope_table(frequencies.to(z.device), gain, place, x.dtype)
        attend = dense_attend(attention, place, rope)
        level = F.silu(self.time(embedded(times, TIME_SIZE).to(x.dtype)))  # (b, m, d)
        for layer in self.layers:
            x = layer(x, level, which, attend)
        x, which = x[:, :n], which[:, :n]
        scale, shift = of_rows(self.modulation(level), which).chunk(2, dim=-1)
        return self.out(self.norm(x) * (1 + scale) + shift)


def of_rows(parts: Float[Tensor, "b m e"], which: Int[Tensor, "b n"]) -> Float[Tensor, "b n e"]:
    """Each latent's own of the m."""
    if parts.shape[1] == 1:
        return parts
    return parts.gather(1, which.unsqueeze(-1).expand(-1, -1, parts.shape[-1]))
