"""The losses of the four stages: an autoencoder, a flow over its latents, both together, and one step from chosen noise."""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dlm.diffusion.rng import Purpose, normal, uniform
from dlm.latent.config import LatentConfig
from dlm.latent.flow import kl
from dlm.latent.network import LatentNetwork, Moments
from dlm.latent.times import Times
from dlm.models.transformer import Transformer
from dlm.training.batch import Batch

ROW, TOKENS, CHANNELS, FIRST = range(4)
"""Purpose DECODER's `token`: a row's noise level; dropped tokens; dropped numbers of latents; the encoder's own draw."""
PROMPT, LENGTH, DROPPED, GUESS, CHOSEN = range(5)
"""Purpose CONDITION's `position`: is there a prompt, how long is it, is it hidden; is a guess shown; is noise the adapter's."""


class LatentObjective(nn.Module):
    """Turns a batch into this process's share of the parts of the loss, which is their sum.

    text: nats a token. flow: ‖v̂ - v‖² a number of a latent. kl, anchor: nats a latent. align: 1 - cosine a token.
    """

    def __init__(
        self,
        network: LatentNetwork,
        config: LatentConfig,
        seed: int,
        teacher: Transformer | None = None,
        anchor: LatentNetwork | None = None,
    ) -> None:
        super().__init__()
        self.network, self.config, self.seed = network, config, seed
        self.times = Times(config)
        self.frozen = teacher, anchor  # in a tuple: no part of what is trained or saved
        self.to_teacher = None
        if teacher is not None:
            self.to_teacher = nn.Linear(network.embed.weight.shape[1], teacher.config.hidden_size, bias=False)
            nn.init.normal_(self.to_teacher.weight, std=0.05, generator=torch.Generator().manual_seed(seed))
        self.seen = -1

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The parts of the stage that is trained."""
        if self.training and batch.step != self.seen:  # not in each of a step's micro-batches
            self.seen = batch.step
            self.times.update()
        stage, draw = self.config.stage, Draw(self.seed, batch)
        if stage == "adapter":
            return self._adapted(batch, draw)
        if stage == "flow":
            with torch.no_grad():
                z = self.network.encode(batch.input_ids)
            return {"flow": self._flow(z, batch, draw)}
        moments = self.network.moments(draw.dropped_tokens(batch.input_ids, self.network, self.config.token_dropout))
        parts = self._text(moments, batch, draw)
        if stage == "joint":
            z = self.network.normalised(moments[0])
            counts = self.config.encoder_gradient
            parts["flow"] = self._flow(counts * z + (1 - counts) * z.detach(), batch, draw)
            if self.config.anchor_weight > 0:
                parts["anchor"] = self.config.anchor_weight * self._anchor(moments, batch)
        return parts

    # --- the autoencoder ------------------------------------------------------------------------------------------

    def _text(self, moments: Moments, batch: Batch, draw: "Draw") -> dict[str, Tensor]:
        """What tokens cost from latents that were dropped and noised, the KL of the latents, and the alignment."""
        c, (mean, log_var) = self.config, moments
        l, parts = batch.input_ids.shape[1], {}
        if log_var is not None:
            z = mean + (0.5 * log_var).exp() * draw.normal(Purpose.DECODER, mean.shape, FIRST)
            if c.kl_weight > 0:
                nats = kl(mean, log_var, free=c.free_bits)
                parts["kl"] = c.kl_weight * nats.sum() / (batch.samples * nats.shape[1])
        else:
            z = mean
        z = self.network.normalised(z)
        level = c.noise * draw.uniform(Purpose.DECODER, token=ROW)[:, None, None]
        if c.latent_dropout > 0:
            z = z * draw.kept(z.shape, c.latent_dropout)
        states = self.network.states(z + level * draw.normal(Purpose.DECODER, z.shape, CHANNELS), l)
        nats = F.cross_entropy(self.network.logits(states).flatten(0, 1), batch.input_ids.flatten(), reduction="sum")
        parts["text"] = nats / (batch.samples * l)
        if self.to_teacher is not None:
            parts["align"] = c.align_weight * self._aligned(states, batch)
        return parts

    def _aligned(self, states: Float[Tensor, "b l d"], batch: Batch) -> Tensor:
        teacher, taps = self.frozen[0], {}
        assert teacher is not None and self.to_teacher is not None
        with torch.no_grad():
            teacher.hidden(batch.input_ids, taps=taps)
        theirs = taps[range(len(taps))[self.config.align_layer]].float()
        away = 1 - F.cosine_similarity(self.to_teacher(states).float(), theirs, dim=-1)
        return away.sum() / (batch.samples * away.shape[1])

    def _anchor(self, moments: Moments, batch: Batch) -> Tensor:
        """KL to the encoder as it was; of one without variances, half the squared distance."""
        anchor = self.frozen[1]
        assert anchor is not None
        with torch.no_grad():
            mean, log_var = anchor.moments(batch.input_ids)
        own, was = (0.0 if x is None else x for x in (moments[1], log_var))
        nats = kl(moments[0], own, mean, was)
        return nats.sum() / (batch.samples * nats.shape[1])

    # --- the flow -------------------------------------------------------------------------------------------------

    def _flow(self, z: Float[Tensor, "b n c"], batch: Batch, draw: "Draw", rows: Tensor | None = None) -> Tensor:
        """‖v̂ - v‖² of the latents that are not clean, of the rows that count."""
        network, path = self.network, self.network.path
        n = z.shape[1]
        clean, hidden = self._given(batch, draw, n)
        size = network.shape.block_length or n
        t = self.times(draw.spread(-(-n // size)))  # (b, m)
        each = t[:, torch.arange(n, device=t.device) // size, None]
        noise = draw.normal(Purpose.NOISE, z.shape)
        shown = torch.where(clean[..., None], z, path.noisy(z, noise, each))
        before = None if network.shape.block_length is None else z
        guess = None
        if network.shape.self_conditioning:
            guess = self._guess(shown, t, each, clean, hidden, before, draw)
        v = network.velocity(shown, t, clean, guess=guess, hidden=hidden, before=before)
        counted = ~clean if rows is None else ~clean & rows[:, None]
        error = (v - path.velocity(z, noise, each)).square().mean(-1) * counted
        if self.training and torch.is_grad_enabled() and self.config.times == "adaptive":
            among = torch.zeros_like(t).index_add(1, torch.arange(n, device=t.device) // size, error.detach())
            count = torch.zeros_like(t).index_add(1, torch.arange(n, device=t.device) // size, counted.float())
            self.times.note(t[count > 0], (among / count.clamp(min=1))[count > 0])
        return error.sum() / (batch.samples * n)

    @torch.no_grad()
    def _guess(
        self, shown: Tensor, t: Tensor, each: Tensor, clean: Tensor, hidden: Tensor, before: Tensor | None, draw: "Draw"
    ) -> Tensor:
        """ẑ of half of the rows, from a forward that was shown none; 0 for the others."""
        rows, guess = draw.uniform(Purpose.CONDITION, position=GUESS) < 0.5, torch.zeros_like(shown)
        if rows.any():
            past = None if before is None else before[rows]
            v = self.network.velocity(shown[rows], t[rows], clean[rows], hidden=hidden[rows], before=past)
            guess[rows] = self.network.path.clean(shown[rows], v, each[rows])
        return guess

    def _given(self, batch: Batch, draw: "Draw", n: int) -> tuple[Bool[Tensor, "b n"], Bool[Tensor, "b n"]]:
        """Latents that stay clean: of the data's prompts or, in some rows, a random number of first ones; and the hidden."""
        clean = ~self.network.open_latents(batch.answer)
        among = partial(draw.uniform, Purpose.CONDITION)
        if bool(batch.answer.all()) and self.network.shape.kind == "chunk":
            length = (among(position=LENGTH) * n).floor() * (among(position=PROMPT) < self.config.prompt_probability)
            clean = torch.arange(n, device=clean.device) < length[:, None]
        return clean, clean & (among(position=DROPPED) < self.config.prompt_drop)[:, None]

    # --- one step from chosen noise (VFM) -------------------------------------------------------------------------

    def _adapted(self, batch: Batch, draw: "Draw") -> dict[str, Tensor]:
        """CE_answer / 2τ² + CE_prompt / 2σ² + β KL(noise ‖ N(0, I)), summed, a token, of rows whose noise is the adapter's.

        The other rows, a share of 1 - alpha, are the flow's: so one step from standard normal noise stays what it was.
        """
        c, network, (b, l) = self.config, self.network, batch.input_ids.shape
        with torch.no_grad():
            z = network.encode(batch.input_ids)
        chosen = draw.uniform(Purpose.CONDITION, position=CHOSEN) < c.alpha
        clean, _ = self._given(batch, draw, z.shape[1])
        mean, log_std = network.start_from(z, clean)
        noise = mean + log_std.exp() * draw.normal(Purpose.PATH, z.shape)
        t = torch.ones(b, 1, device=z.device)
        found = network.path.clean(noise, network.velocity(noise, t, torch.zeros_like(clean)), t[..., None])
        logits = network.decode(found, l)
        nats = F.cross_entropy(logits.flatten(0, 1), batch.input_ids.flatten(), reduction="none").view(b, l)
        given = clean.repeat_interleave(network.shape.tokens_per_latent, dim=1)[:, :l]
        share = chosen.float()[:, None] / (batch.samples * l)
        return {
            "answer": (nats * ~given * share).sum() / (2 * c.tau**2),
            "prompt": (nats * given * share).sum() / (2 * c.sigma**2),
            "kl": c.beta * (kl(mean, 2 * log_std) * share).sum(),
            "flow": self._flow(z, batch, draw, ~chosen),
        }


class Draw:
    """The random numbers of a batch's rows, by their addresses: the same however the step is cut, and when it is run again."""

    def __init__(self, seed: int, batch: Batch) -> None:
        self.seed, self.batch = seed, batch
        self.index = batch.index

    def uniform(self, purpose: Purpose, position: int = 0, token: int = 0) -> Float[Tensor, " b"]:
        """One number a row."""
        where = {"sample": self.index, "step": self.batch.step, "position": position, "token": token}
        return uniform(purpose, seed=self.seed, **where).float()

    def spread(self, blocks: int) -> Float[Tensor, "b m"]:
        """One number a row and block; a block's lie evenly over (0, 1) in the step, which lowers the loss's variance."""
        block = torch.arange(blocks, device=self.index.device)
        first = uniform(Purpose.TIME, seed=self.seed, step=self.batch.step, position=block)  # (m,)
        return (first + (self.index % self.batch.samples)[:, None] / self.batch.samples) % 1.0

    def normal(self, purpose: Purpose, shape: torch.Size, kind: int = 0) -> Float[Tensor, "b n c"]:
        """One number for each of a latent; several `kind`s of one purpose are numbered."""
        place = torch.arange(shape[1], device=self.index.device) + kind * 2**20
        where = {"sample": self.index[:, None], "step": self.batch.step, "position": place}
        return normal(purpose, seed=self.seed, size=shape[2], **where)

    def dropped_tokens(self, ids: Tensor, network: LatentNetwork, share: float) -> Tensor:
        """Ids with [MASK] in some places."""
        if share == 0 or network.config.mask_token_id is None:
            return ids
        place = torch.arange(ids.shape[1], device=ids.device)
        where = {"sample": self.index[:, None], "step": self.batch.step, "position": place, "token": TOKENS}
        drawn = uniform(Purpose.DECODER, seed=self.seed, **where)
        return torch.where(drawn < share, network.config.mask_token_id, ids)

    def kept(self, shape: torch.Size, dropped: float) -> Float[Tensor, "b n c"]:
        """1 / (1 - dropped), and 0 in the share that is dropped."""
        drawn = torch.special.ndtr(self.normal(Purpose.PATH, shape, CHANNELS))
        return (drawn >= dropped).float() / (1 - dropped)
