"""A latent model under training: what `trainable.kind = "latent"` trains, stage by stage, under [trainable.own]."""

from pathlib import Path
from typing import Self

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dlm import config as toml
from dlm.data.loader import BatchLoader
from dlm.data.source import build_stream
from dlm.errors import UserError
from dlm.inference.generation import generate
from dlm.latent.config import LatentConfig, Shape
from dlm.latent.likelihood import best_start, bound
from dlm.latent.lm import LatentLM
from dlm.latent.network import LatentNetwork, config_of
from dlm.latent.objective import LatentObjective
from dlm.models.loading import load
from dlm.models.transformer import Transformer
from dlm.training.config import TrainConfig
from dlm.training.profile import Ranges
from dlm.training.start import tokenizer_of
from dlm.training.trainable import Matrices, Trainable
from dlm.training.validate import HeldOut

WHERE = "[trainable.own]"
STATISTICS_ROWS = 256
"""Training sequences that the latents' mean and std are taken of."""
BOUND_ROWS = 32
"""Those that decide t_min."""
AUTOENCODER = ("kind", "tokens_per_latent", "latents", "channels", "variational", "autoencoder")
"""Settings that a checkpoint's autoencoder decides; the rest of the shape is decided by its flow, if it has one."""


class LatentModel(Trainable):
    """trainable.kind = "latent"."""

    network: LatentNetwork
    layerwise = False

    def __init__(self, lm: LatentLM, own: LatentConfig, config: TrainConfig) -> None:
        self.network, self.tokenizer, self.own, self.config, self._lm = lm.network, lm.tokenizer, own, config, lm
        self.likelihood = own.stage != "autoencoder"
        self.teacher: Transformer | None = None if own.align is None else self._teacher(own.align)
        self.anchor = None
        if own.stage == "joint" and own.anchor_weight > 0:
            self.anchor = _copy(lm.network).requires_grad_(False).eval()

    @classmethod
    def start(cls, config: TrainConfig, a: Accelerator) -> Self:
        """New in the first stage, and else what train.init_from holds with what the stage adds to it."""
        own, t = toml.check(LatentConfig, config.trainable.own, WHERE), config.train
        if t.init_from is None and own.stage != "autoencoder":
            raise UserError(
                f'{WHERE} stage = "{own.stage}" goes on from an autoencoder: set train.init_from to the folder that '
                'stage = "autoencoder" left'
            )
        if t.init_from is None:
            tokenizer = tokenizer_of(config)
            ids = {name: getattr(tokenizer, name) for name in ("mask_token_id", "eos_token_id", "pad_token_id")}
            network = LatentNetwork(own.shape, config_of(own.shape, tokenizer.vocab_size, t.length, ids))
            network.initialise(torch.Generator().manual_seed(t.seed))
            return cls(LatentLM(network, tokenizer, "new"), own, config)
        lm = load(t.init_from, dtype="float32", device="cpu")
        if not isinstance(lm, LatentLM):
            raise UserError(
                f"train.init_from = {t.init_from!r} is a {lm.config.model_type} network, which predicts tokens: "
                "trainable.kind = latent goes on from a latent model's folder"
            )
        if t.length > lm.network.length:
            raise UserError(
                f"train.length = {t.length} exceeds the {lm.network.length} tokens that train.init_from was made for"
            )
        own = _continued(own, lm.network.shape, t.init_from)
        network = LatentNetwork(
            own.shape, config_of(own.shape, lm.config.vocab_size, lm.network.length, _ids(lm.network))
        )
        network.initialise(torch.Generator().manual_seed(t.seed))
        network.load_state_dict(lm.network.state_dict(), strict=False)  # what the stage adds is new
        if own.stage in ("flow", "adapter"):
            for part in (network.embed, network.encoder, network.decoder):
                part.requires_grad_(False)
        model = cls(LatentLM(network, lm.tokenizer, "new"), own, config)
        if lm.network.shape.stage == "autoencoder" and own.stage != "autoencoder":
            model.measure_statistics()
        return model

    def _teacher(self, name: str) -> Transformer:
        lm = load(name, dtype="float32", device="cpu")
        mine = None if self.tokenizer is None else self.tokenizer.fingerprint
        if lm.tokenizer is None or lm.tokenizer.fingerprint != mine or not isinstance(lm.network, Transformer):
            raise UserError(
                f'{WHERE} align = "{name}" has another tokenizer than the data: give a model with the same one'
            )
        layers = lm.config.num_hidden_layers
        if not -layers <= self.own.align_layer < layers:
            raise UserError(f'{WHERE} align_layer = {self.own.align_layer}: "{name}" has layers 0 to {layers - 1}')
        return lm.network.requires_grad_(False).eval()

    @torch.no_grad()
    def measure_statistics(self) -> None:
        """Store the mean and std of each channel over training text, to which the flow's latents are brought."""
        rows = self._training_rows(STATISTICS_ROWS).split(32)
        z = torch.cat([self.network.moments(ids)[0].flatten(0, 1) for ids in rows]).double()
        self.network.mean.copy_(z.mean(0))
        self.network.std.copy_(z.std(0).clamp(min=1e-3))

    def _training_rows(self, count: int) -> Tensor:
        t = self.config.train
        stream = build_stream(self.config.data, self.tokenizer, t.length, "train", t.seed)
        return next(BatchLoader(stream, count, keep_partial=True))["input_ids"]

    def objective(self, ranges: Ranges) -> LatentObjective:
        """The parts of the stage's loss."""
        device = self.network.embed.weight.device
        for frozen in (self.teacher, self.anchor):
            if frozen is not None:
                frozen.to(device)
        return LatentObjective(self.network, self.own, self.config.train.seed, self.teacher, self.anchor).to(device)

    def matrices(self) -> Matrices:
        """Products' matrices are hidden ones; what is looked up is an embedding."""
        return self.network.matrices()

    def flops_a_token(self) -> float:
        """6 a weight and row that it is applied to, and attention; half of the rows run once more to guess, forward alone."""
        network, own = self.network, self.own.stage
        length = self.config.train.length
        n = network.shape.latents_of(length)
        encoding, decoding = (_a_text(part, length, n) for part in (network.encoder, network.decoder))
        head, flow = network.embed.weight.numel() * length, 0.0
        if (denoiser := network.denoiser) is not None:
            levels = 2 + (1 if network.shape.block_length is None else -(-n // network.shape.block_length))
            streams, c = (1 if network.shape.block_length is None else 2), denoiser.config
            turned = [part for name, part in denoiser.named_modules() if name.endswith("modulation") or name == "time"]
            turning = sum(map(_size, turned))
            rest = _size(denoiser) - turning + 2 * streams * n * c.hidden_size * c.num_hidden_layers
            flow = rest * streams * n + turning * levels
        again = 7.0 if network.shape.self_conditioning else 6.0  # 6, and half of the rows' 2
        if own == "flow":
            return (again * flow + 2 * encoding) / length
        work = 6 * (encoding + decoding + head)
        return (work + (again * flow if own == "joint" else 12 * flow if own == "adapter" else 0.0)) / length

    def nats(self, ids: Tensor, answer: Tensor, index: Tensor, draws: int, seed: int) -> Tensor:
        """Draws of the bound."""
        return bound(self.network, ids, answer=answer, index=index, draws=draws, seed=seed)

    @torch.no_grad()
    def figures(self, held_out: HeldOut) -> tuple[dict[str, float], str]:
        """Held-out tokens that come back right, from latents as they are and under noise of 0.3 and 1 of their std."""
        if self.own.stage not in ("autoencoder", "joint"):
            return {}, ""
        self.network.eval()
        found = reconstruction(self.network, torch.cat([ids for ids, _ in held_out.batches]))
        self.network.train()
        words = ", ".join(f"{found[f'right/{level:g}']:.2%} under {level:g} std" for level in LEVELS)
        spread = f"channels' std {found['std/least']:.2f} to {found['std/most']:.2f}"
        return found, f"tokens that come back: {words}; {spread}"

    def sample(self, prompt: str, gen_length: int) -> str:
        """What follows the prompt."""
        return generate(self.lm, [prompt], gen_length=gen_length)[0].text

    @property
    def lm(self) -> LatentLM:
        """The model as users hold it, with the weights of now."""
        return LatentLM(self.network, self.tokenizer, self._lm.name)

    def save(self, config: TrainConfig) -> None:
        """A folder that `dlm.load` reads."""
        if self.likelihood and self.own.t_min is None:
            level = best_start(self.network, self._training_rows(BOUND_ROWS))
            self.network.shape = self.network.shape.model_copy(update={"t_min": level})
        self.lm.save(Path(config.train.out), dtype=config.train.save_dtype, overwrite=True)


LEVELS = (0.0, 0.3, 1.0)


@torch.no_grad()
def reconstruction(network: LatentNetwork, ids: Tensor) -> dict[str, float]:
    """Shares of tokens that the decoder gives back under noise of so many std of each channel, and the channels' std."""
    ids = ids.to(network.embed.weight.device)
    z = network.encode(ids)
    std = z.flatten(0, 1).std(0)
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).to(z.device) * std
    found = {
        f"right/{s:g}": (network.decode(z + s * noise, ids.shape[1]).argmax(-1) == ids).float().mean().item()
        for s in LEVELS
    }
    return {**found, "std/least": std.min().item(), "std/most": std.max().item()}


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _a_text(part: nn.Module, tokens: int, latents: int) -> float:
    """Weights of an encoder or a decoder times the rows they are applied to: of chunks, some are for every token."""
    inner = getattr(part, "inner", None)
    if inner is None:  # a perceiver reads the text and its own latents in every layer
        return _size(part) * float(tokens + latents)
    return _size(inner) * float(tokens) + (_size(part) - _size(inner)) * float(latents)


def _copy(network: LatentNetwork) -> LatentNetwork:
    twin = LatentNetwork(network.shape, network.config)
    twin.load_state_dict(network.state_dict())
    return twin


def _ids(network: LatentNetwork) -> dict[str, int | None]:
    return {name: getattr(network.config, name) for name in ("mask_token_id", "eos_token_id", "pad_token_id")}


def _continued(own: LatentConfig, saved: Shape, name: str) -> LatentConfig:
    """The settings, with the checkpoint's shape where they name none; a UserError where they name another."""
    fixed = (
        AUTOENCODER if saved.stage == "autoencoder" else [f for f in Shape.model_fields if f not in ("stage", "t_min")]
    )
    for field in fixed:
        now, was = getattr(own, field), getattr(saved, field)
        if field in own.model_fields_set and now != was:
            shown = [x.model_dump() if hasattr(x, "model_dump") else x for x in (now, was)]
            raise UserError(
                f"{WHERE} {field} = {shown[0]}, but train.init_from = {name!r} has {shown[1]}: leave {field} out, or train "
                "an autoencoder anew"
            )
    if own.stage == "autoencoder" and saved.stage != "autoencoder":
        raise UserError(
            f'{WHERE} stage = "autoencoder", but train.init_from = {name!r} has a flow, which would be lost: use "joint"'
        )
    merged = own.model_copy(update={field: getattr(saved, field) for field in fixed})
    if merged.block_length is not None and merged.kind == "perceiver":
        raise UserError(f"{WHERE} block_length = {merged.block_length}, but train.init_from = {name!r} is a perceiver")
    if merged.stage == "adapter" and (merged.kind == "perceiver" or merged.block_length is not None):
        raise UserError(f'{WHERE} stage = "adapter" needs kind = "chunk" without block_length, and {name!r} is another')
    if merged.kl_weight > 0 and not merged.variational:
        raise UserError(f"{WHERE} kl_weight = {merged.kl_weight}, but train.init_from = {name!r} is not variational")
    return merged
