"""The whole network of a latent model: autoencoder, stored statistics of its latents, denoiser, and an adapter if any."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm.latent.autoencoder import ChunkDecoder, ChunkEncoder
from dlm.latent.config import FAMILY, Shape
from dlm.latent.denoiser import Denoiser
from dlm.latent.flow import PATHS
from dlm.latent.perceiver import PerceiverDecoder, PerceiverEncoder
from dlm.models.attention import AttentionSpec
from dlm.models.config import ModelConfig

Moments = tuple[Tensor, Tensor | None]
"""Means and, of a variational encoder, log-variances, (b, n, c) each."""


def config_of(shape: Shape, vocab_size: int, length: int, ids: dict[str, int | None]) -> ModelConfig:
    """The denoiser's shape with what is known of the tokens, as other models have it; `length` is in tokens."""
    block = None if shape.block_length is None else shape.block_length * shape.tokens_per_latent
    return ModelConfig.model_validate(
        {
            **shape.denoiser.heads,
            "position_embedding": shape.denoiser.position_embedding,
            "model_type": FAMILY,
            "vocab_size": vocab_size,
            "max_position_embeddings": length,
            **ids,
            "attention": "bidirectional" if block is None else "block_causal",
            "block_length": block,
        }
    )


class LatentNetwork(nn.Module):
    """Tokens ⇄ latents, and the velocity of noisy latents. Latents are normalised by the stored mean and std."""

    mean: Tensor
    std: Tensor

    def __init__(self, shape: Shape, config: ModelConfig) -> None:
        super().__init__()
        self.shape, self.config, self.path = shape, config, PATHS[shape.path]
        self.attention = AttentionSpec.of(config)
        self.sight = (
            AttentionSpec() if shape.block_length is None else AttentionSpec("block_causal", shape.block_length)
        )
        """Who sees whom among latents."""
        self.group = None  # as in Transformer: the processes that share layers
        self.length = config.max_position_embeddings
        inner, c = shape.autoencoder.network(config.vocab_size), shape.channels
        outputs = 2 * c if shape.variational else c
        self.embed = nn.Embedding(config.vocab_size, inner.hidden_size)  # is also the decoder's head
        if shape.kind == "chunk":
            self.encoder, self.decoder = ChunkEncoder(shape, inner, outputs), ChunkDecoder(shape, inner)
        else:
            self.encoder = PerceiverEncoder(shape, inner, self.length, outputs)
            self.decoder = PerceiverDecoder(shape, inner, self.length)
        self.register_buffer("mean", torch.zeros(c))
        self.register_buffer("std", torch.ones(c))
        latents = shape.latents_of(self.length)
        self.denoiser = self.adapter = None
        if shape.stage != "autoencoder":
            self.denoiser = Denoiser(config, c * (1 + shape.self_conditioning), c, latents)
        if shape.stage == "adapter":
            half = config.model_copy(update={"num_hidden_layers": -(-config.num_hidden_layers // 2)})
            self.adapter = Denoiser(half, c, 2 * c, latents)

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights by the number of inputs; what turns layers and what leaves a denoiser begins as 0."""
        depth = 2 * self.config.num_hidden_layers
        for name, p in self.named_parameters():
            if ".modulation." in name or name.endswith("bias") or name.startswith(("denoiser.out", "adapter.out")):
                nn.init.zeros_(p)
            elif p.ndim < 2:
                nn.init.ones_(p)
            elif self._looked_up(name):
                # A denoiser's positions are as loud as the latents that they are added to: softer ones go unheard.
                std = 1.0 if name.startswith(("denoiser.", "adapter.")) else p.shape[1] ** -0.5
                nn.init.normal_(p, std=std, generator=generator)
            else:
                back = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=(p.shape[1] * (depth if back else 1)) ** -0.5, generator=generator)

    @staticmethod
    def _looked_up(name: str) -> bool:
        return name.endswith(("embed.weight", "positions.weight", "queries.weight", "order.weight"))

    def matrices(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by optimiser group: products' matrices, and rows that are looked up."""
        found = [(name, p) for name, p in self.named_parameters() if p.ndim == 2]
        looked_up = [p for name, p in found if self._looked_up(name)]
        return {"hidden": [p for name, p in found if not self._looked_up(name)], "embed": looked_up}

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Put the weights there, in place; the statistics stay fp32, as latents are outside of the parts."""
        mean, std = self.mean, self.std
        self.to(device=device, dtype=dtype)
        self.mean, self.std = mean.to(device), std.to(device)

    # --- tokens and latents ---------------------------------------------------------------------------------------

    def padded(self, ids: Int[Tensor, "b l"]) -> Int[Tensor, "b m"]:
        """The last chunk filled with end-of-text."""
        if self.shape.kind == "perceiver" or not (short := -ids.shape[1] % self.shape.tokens_per_latent):
            return ids
        return F.pad(ids, (0, short), value=self.config.eos_token_id or 0)

    def moments(self, ids: Int[Tensor, "b l"], valid: Bool[Tensor, "b l"] | None = None) -> Moments:
        """What the encoder says of a text, before normalisation. `valid` is False on padding, which a perceiver skips."""
        x = self.embed(self.padded(ids))
        out = self.encoder(x) if isinstance(self.encoder, ChunkEncoder) else self.encoder(x, valid)
        if self.shape.variational:
            mean, log_var = out.chunk(2, dim=-1)
            return mean, log_var.clamp(-20, 4)
        return F.rms_norm(out, out.shape[-1:], eps=1e-6), None

    def encode(self, ids: Int[Tensor, "b l"], valid: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b n c"]:
        """A text's latents, normalised: the encoder's means."""
        return self.normalised(self.moments(ids, valid)[0])

    def normalised(self, z: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        return (z.float() - self.mean) / self.std

    def states(self, z: Float[Tensor, "b n c"], length: int) -> Float[Tensor, "b l d"]:
        """The decoder's states of `length` tokens, from normalised latents."""
        return self.decoder((z * self.std + self.mean).to(self.embed.weight.dtype), length)

    def logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """In fp32; [MASK] is never written."""
        logits = F.linear(states, self.embed.weight).float()
        mask = self.config.mask_token_id
        return (
            logits if mask is None else logits.index_fill(-1, torch.tensor([mask], device=logits.device), float("-inf"))
        )

    def decode(self, z: Float[Tensor, "b n c"], length: int) -> Float[Tensor, "b l v"]:
        """Logits of `length` tokens."""
        return self.logits(self.states(z, length))

    def open_latents(self, open_tokens: Bool[Tensor, "b l"]) -> Bool[Tensor, "b n"]:
        """The latents of which some token is open; of a perceiver all, where any token is."""
        if self.shape.kind == "perceiver":
            return open_tokens.any(-1, keepdim=True).expand(-1, self.shape.latents)
        short = -open_tokens.shape[1] % self.shape.tokens_per_latent
        return F.pad(open_tokens, (0, short)).unflatten(1, (-1, self.shape.tokens_per_latent)).any(-1)

    # --- the flow -------------------------------------------------------------------------------------------------

    def velocity(
        self,
        z: Float[Tensor, "b n c"],
        t: Float[Tensor, "b m"],
        clean: Bool[Tensor, "b n"],
        *,
        guess: Float[Tensor, "b n c"] | None = None,
        hidden: Bool[Tensor, "b n"] | None = None,
        before: Float[Tensor, "b n c"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """v̂ of latents at time t, or at one time a block (m of them); those that are `clean` count as at time 0.

        `guess` is ẑ of an earlier call. `hidden` ones, of the clean, are not shown. With `before`, all latents of the
        text, clean, each block of z sees itself and the blocks of `before` in front of it.
        """
        assert self.denoiser is not None, "an autoencoder alone has no flow"
        (b, n), m = z.shape[:2], t.shape[1]
        block = (
            torch.arange(n, device=z.device) // (self.shape.block_length or n) if m > 1 else torch.zeros_like(clean[0])
        )
        times = torch.cat((t, t.new_zeros(b, 1), t.new_ones(b, 1)), dim=1)
        which = torch.where(clean, m, block.long())
        sight = self.sight
        x = self._shown(z, guess, clean)
        if hidden is not None:
            which, x = which.masked_fill(hidden, m + 1), x.masked_fill(hidden.unsqueeze(-1), 0)
        if before is not None:
            assert self.shape.block_length is not None
            sight = AttentionSpec("two_stream", self.shape.block_length)
            seen, known = self._shown(before, None, clean), torch.full_like(which, m)
            if hidden is not None:
                known, seen = known.masked_fill(hidden, m + 1), seen.masked_fill(hidden.unsqueeze(-1), 0)
            x, which = torch.cat((x, seen), dim=1), torch.cat((which, known), dim=1)
        return self.denoiser(x.to(self.embed.weight.dtype), times, which, sight).float()

    def _shown(self, z: Tensor, guess: Tensor | None, clean: Tensor) -> Tensor:
        if not self.shape.self_conditioning:
            return z
        guess = torch.zeros_like(z) if guess is None else guess.masked_fill(clean.unsqueeze(-1), 0)
        return torch.cat((z, guess), dim=-1)

    def start_from(self, z: Float[Tensor, "b n c"], clean: Bool[Tensor, "b n"]) -> tuple[Tensor, Tensor]:
        """The adapter's noise (VFM): mean and log-std of what one step should start from, given the clean latents."""
        assert self.adapter is not None
        times = torch.tensor([[1.0, 0.0]], device=z.device).expand(len(z), -1)
        shown = z.masked_fill(~clean.unsqueeze(-1), 0).to(self.embed.weight.dtype)
        mean, log_std = self.adapter(shown, times, clean.long(), AttentionSpec()).float().chunk(2, dim=-1)
        return mean, log_std.clamp(-5, 2)
