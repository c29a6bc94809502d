"""The `perceiver` autoencoder (LD4LG): learned queries read a whole text into a fixed number of latents, and back."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dlm.latent.config import Shape
from dlm.models.attention import Attend, Attention, RMSNorm
from dlm.models.config import ModelConfig
from dlm.models.transformer import MLP


def reading(queries: int, valid: Bool[Tensor, "b k"] | None) -> Attend:
    """Attention of the last `queries` rows to all rows that are `valid`; the others' results are not computed."""
    mask = None if valid is None else valid[:, None, None, :]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q[:, -queries:].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


class Reader(nn.Module):
    """Queries that read [keys; queries], layer after layer."""

    def __init__(self, network: ModelConfig, layers: int) -> None:
        super().__init__()
        d, eps = network.hidden_size, network.rms_norm_eps
        self.attns = nn.ModuleList(Attention(network, i) for i in range(layers))
        self.mlps = nn.ModuleList(MLP(network) for _ in range(layers))
        self.key_norms, self.query_norms, self.mlp_norms = (
            nn.ModuleList(RMSNorm(d, eps) for _ in range(layers)) for _ in range(3)
        )
        self.norm = RMSNorm(d, eps)

    def forward(
        self, keys: Float[Tensor, "b k d"], x: Float[Tensor, "b q d"], valid: Bool[Tensor, "b k"] | None = None
    ) -> Float[Tensor, "b q d"]:
        if valid is not None:
            valid = torch.cat((valid, valid.new_ones(x.shape[:2])), dim=1)
        attend = reading(x.shape[1], valid)
        for attn, mlp, key_norm, query_norm, mlp_norm in zip(
            self.attns, self.mlps, self.key_norms, self.query_norms, self.mlp_norms, strict=True
        ):
            x = x + attn(torch.cat((key_norm(keys), query_norm(x)), dim=1), attend)
            x = x + mlp(mlp_norm(x))
        return self.norm(x)


class PerceiverEncoder(nn.Module):
    """Tokens' vectors and their positions to what `latents` latents are made of."""

    def __init__(self, shape: Shape, network: ModelConfig, length: int, outputs: int) -> None:
        super().__init__()
        d = network.hidden_size
        self.positions, self.queries = nn.Embedding(length, d), nn.Embedding(shape.latents, d)
        self.reader = Reader(network, shape.autoencoder.num_hidden_layers)
        self.out = nn.Linear(d, outputs)

    def forward(self, x: Float[Tensor, "b l d"], valid: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b n o"]:
        keys = x + self.positions.weight[: x.shape[1]]
        return self.out(self.reader(keys, self.queries.weight.expand(len(x), -1, -1), valid))


class PerceiverDecoder(nn.Module):
    """Latents to the states of the text's tokens: each position has a learned query, which reads the latents."""

    def __init__(self, shape: Shape, network: ModelConfig, length: int) -> None:
        super().__init__()
        d = network.hidden_size
        self.enter, self.order = nn.Linear(shape.channels, d), nn.Embedding(shape.latents, d)
        self.queries = nn.Embedding(length, d)
        self.reader = Reader(network, shape.autoencoder.num_hidden_layers)

    def forward(self, z: Float[Tensor, "b n c"], length: int) -> Float[Tensor, "b l d"]:
        keys = self.enter(z) + self.order.weight
        return self.reader(keys, self.queries.weight[:length].expand(len(z), -1, -1))
