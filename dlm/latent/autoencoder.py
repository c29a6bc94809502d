"""The `chunk` autoencoder: every few tokens become one latent, and tokens again."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm.latent.config import Shape
from dlm.models.attention import RMSNorm
from dlm.models.config import ModelConfig
from dlm.models.transformer import MLP


class Residual(nn.Module):
    """x + feed-forward(norm(x)), several times."""

    def __init__(self, config: ModelConfig, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(layers))
        self.mlps = nn.ModuleList(MLP(config) for _ in range(layers))

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return x


class ChunkEncoder(nn.Module):
    """Tokens' vectors, joined K at a time, to what a latent is made of. A chunk sees itself alone."""

    def __init__(self, shape: Shape, network: ModelConfig, outputs: int) -> None:
        super().__init__()
        self.size, layers, d = shape.tokens_per_latent, shape.autoencoder.num_hidden_layers, network.hidden_size
        self.inner, self.outer = Residual(network, 1), Residual(network, layers)
        self.join = nn.Linear(self.size * d, d, bias=False)
        self.norm = RMSNorm(d, network.rms_norm_eps)
        self.out = nn.Linear(d, outputs)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b n o"]:
        joined = self.join(self.inner(x).unflatten(1, (-1, self.size)).flatten(2))
        return self.out(self.norm(self.outer(joined)))


class ChunkDecoder(nn.Module):
    """Latents to the states of their tokens."""

    def __init__(self, shape: Shape, network: ModelConfig) -> None:
        super().__init__()
        self.size, layers, d = shape.tokens_per_latent, shape.autoencoder.num_hidden_layers, network.hidden_size
        self.enter = nn.Linear(shape.channels, d)
        self.outer, self.inner = Residual(network, layers), Residual(network, 1)
        self.part = nn.Linear(d, self.size * d, bias=False)
        self.norm = RMSNorm(d, network.rms_norm_eps)

    def forward(self, z: Float[Tensor, "b n c"], length: int) -> Float[Tensor, "b l d"]:
        parts: Int[Tensor, ...] | Tensor = self.part(self.outer(self.enter(z)))
        return self.norm(self.inner(parts.unflatten(2, (self.size, -1)).flatten(1, 2)))[:, :length]
