"""Latent networks small enough for a test, with all weights far from their defaults."""

import torch

from dlm.latent.config import AutoencoderConfig, DenoiserConfig, Shape
from dlm.latent.lm import LatentLM
from dlm.latent.network import LatentNetwork, config_of

IDS = {"mask_token_id": 40, "eos_token_id": 1, "pad_token_id": 1}
CODING = AutoencoderConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
DENOISING = DenoiserConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)


def network(seed: int = 0, **fields) -> LatentNetwork:
    """Random everywhere, also where a new network is 0."""
    fields = {"stage": "flow", "tokens_per_latent": 3, "channels": 6, **fields}
    if fields.get("kind") == "perceiver":
        del fields["tokens_per_latent"]
    shape = Shape(**fields, autoencoder=CODING, denoiser=DENOISING)
    found = LatentNetwork(shape, config_of(shape, 48, 36, IDS))
    generator = torch.Generator().manual_seed(seed)
    found.initialise(generator)
    for p in found.parameters():
        p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
    found.mean.normal_(generator=generator)
    found.std.uniform_(0.5, 2, generator=generator)
    return found.eval()


def model(**fields) -> LatentLM:
    return LatentLM(network(**fields), None, "tiny")


def ids(rows: int = 3, length: int = 20) -> torch.Tensor:
    return torch.randint(2, 39, (rows, length), generator=torch.Generator().manual_seed(1))


def noise(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
