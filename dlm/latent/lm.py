"""`LatentLM`, what `dlm.load` returns for a folder of family `dlm_latent`: it decodes by itself, and has no engine."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from dlm.errors import UserError
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.latent.config import FAMILY, Shape
from dlm.latent.likelihood import bound
from dlm.latent.network import LatentNetwork, config_of
from dlm.models.device import DTYPES
from dlm.models.folder import replacing
from dlm.models.lm import LM
from dlm.models.settings import Settings
from dlm.models.shards import WEIGHTS, declared, opened, weight_files

if TYPE_CHECKING:
    from dlm.inference.decoding import Decoding
    from dlm.inference.request import Generation

IDS = ("mask_token_id", "eos_token_id", "pad_token_id")
READ = {"gen_length", "steps", "block_length", "temperature", "top_k", "top_p", "cfg_scale", "seed", "num_samples"}
READ |= {"max_gen_length", "stop", "solver", "allow_long"}
"""Settings of the sampler that a latent model reads."""


@dataclass(eq=False, repr=False)
class LatentLM(LM):
    """A latent diffusion model with its tokenizer. `dlm.generate` and `dlm-infer` write with it."""

    network: LatentNetwork  # pyright: ignore[reportIncompatibleVariableOverride]
    refuses: ClassVar[str] = (
        "is a latent diffusion model: it has no masked tokens, no keys to cache and no step that commits some; "
        "dlm.generate writes with it"
    )
    exact: ClassVar[bool] = False

    def predict(self, *_: Any, **__: Any) -> Tensor:
        """Raises UserError: there are no logits of single masked tokens."""
        raise UserError(f"predict(): model {self.name!r} {self.refuses}")

    def nats(self, ids: Tensor, answer: Tensor, index: Tensor, draws: int, seed: int) -> Tensor:
        """Draws of the likelihood's bound, (b, draws); see `dlm.latent.likelihood.bound`."""
        return bound(self.network, ids, answer=answer, index=index, draws=draws, seed=seed)

    def settled(self, settings: SamplerConfig, where: str) -> SamplerConfig:
        """The settings as this model reads them; a UserError for those it does not."""
        for name in settings.model_fields_set:
            value = getattr(settings, name)
            if name not in READ and value != SamplerConfig.model_fields[name].get_default():
                raise UserError(f"{where}: {name} = {value!r:.60} is not read: model {self.name!r} {self.refuses}")
        shape, length = self.network.shape, settings.gen_length
        if shape.stage == "autoencoder":
            raise UserError(
                f"{where}: model {self.name!r} is an autoencoder alone: train its flow (configs/latent/flow.toml)"
            )
        if settings.solver == "adapter" and self.network.adapter is None:
            raise UserError(f'{where}: solver = "adapter": model {self.name!r} has none: train stage = "adapter"')
        if settings.solver == "adapter" and (settings.steps not in (None, 1) or settings.cfg_scale > 0):
            raise UserError(f'{where}: solver = "adapter" is one step without guidance: leave steps and cfg_scale out')
        if shape.block_length is not None:
            own = shape.block_length * shape.tokens_per_latent
            if settings.block_length not in (None, own):
                raise UserError(
                    f"{where}: block_length = {settings.block_length}: model {self.name!r} has blocks of {own}"
                )
            return settings.model_copy(update={"block_length": own})
        if length == "auto":
            raise UserError(
                f'{where}: gen_length = "auto" adds blocks, and model {self.name!r} has none: give a number'
            )
        if settings.block_length not in (None, length):
            raise UserError(
                f"{where}: block_length = {settings.block_length} is not read: model {self.name!r} writes all at once"
            )
        return settings.model_copy(update={"block_length": length})

    def run(
        self,
        decodings: "Sequence[Decoding]",
        engine: EngineConfig,
        batch_size: int,
        trace: Any = None,
        on_step: Any = None,
        draft: Any = None,
    ) -> "list[Generation]":
        """Decode these; what `dlm.generate` calls in place of an engine. A UserError for a draft, a cache and the like."""
        from dlm.latent.writing import write

        if draft is not None:
            raise UserError(
                f"draft = {getattr(draft, 'name', draft)!r:.60} is not read: model {self.name!r} {self.refuses}"
            )
        for name in engine.model_fields_set:
            value, default = getattr(engine, name), EngineConfig.model_fields[name].get_default()
            if value != default and (name, value) != ("cache", "none"):
                raise UserError(f"{name} = {value!r} is not read: model {self.name!r} {self.refuses}")
        return write(self, decodings, batch_size, trace, on_step)

    def save(
        self, folder: str | Path, family: str | None = None, *, dtype: str | None = None, overwrite: bool = False
    ) -> None:
        """Write config.json, model.safetensors and the tokenizer, all of it or nothing; `family` can only be its own."""
        if family not in (None, FAMILY):
            raise UserError(
                f"family = {family!r}: model {self.name!r} is of family {FAMILY!r}, which no other can express"
            )
        kind = self.dtype if dtype is None else DTYPES.get(dtype)
        if kind is None:
            raise UserError(f"dtype={dtype!r} is not known; use {', '.join(DTYPES)}")
        config, network = self.network.config, self.network
        hub = {"model_type": FAMILY, "vocab_size": config.vocab_size, "length": network.length}
        hub |= {name: getattr(config, name) for name in IDS} | {"torch_dtype": str(kind).removeprefix("torch.")}
        hub["latent"] = network.shape.model_dump(mode="json")
        exact = ("mean", "std")
        weights = {
            name: tensor.detach().to("cpu", torch.float32 if name in exact else kind).contiguous()
            for name, tensor in network.state_dict().items()
        }
        with replacing(Path(folder), overwrite) as work:
            (work / "config.json").write_text(json.dumps(hub, indent=2) + "\n", "utf-8")
            save_file(weights, work / WEIGHTS, metadata={"format": "pt"})
            if self.tokenizer is not None:
                self.tokenizer.save(work)


def read(
    folder: Path,
    settings: Mapping[str, Any],
    source: str,
    tokenizer: Any,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
) -> LatentLM:
    """The model in a folder that `LatentLM.save` wrote; a UserError names what does not fit."""
    hub = Settings(settings, source)
    table = {key: value for key, value in hub.table("latent").items() if not _unread(key, hub.table("latent"))}
    try:
        shape = Shape.model_validate(table)
        config = config_of(shape, hub.size("vocab_size"), hub.size("length"), {key: settings.get(key) for key in IDS})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise UserError(f"{source}: latent.{where}: {problem['msg'].removeprefix('Value error, ')}") from error
    files = weight_files(folder)
    found = declared(files)
    with torch.device("meta"):
        network = LatentNetwork(shape, config)
    ours = network.state_dict()
    for key in ours.keys() | found.keys():
        if key not in found or key not in ours or tuple(found[key].shape) != tuple(ours[key].shape):
            there = f"has {key!r} of shape {found[key].shape}" if key in found else f"lacks {key!r}"
            asked = f"asks for {tuple(ours[key].shape)}" if key in ours else "asks for none"
            raise UserError(f"{folder}: its weights' file {there}; config.json {asked}")
    network = LatentNetwork(shape, config)
    ours = network.state_dict()
    with torch.no_grad():
        for file in files:
            with opened(file, torch.device("cpu")) as shard:
                for key in shard.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                    ours[key].copy_(shard.get_tensor(key))
    network.move(device, dtype)
    return LatentLM(network.eval(), tokenizer, name)


def _unread(key: str, table: Mapping[str, Any]) -> bool:
    """Whether a saved setting only stands there because all do."""
    reader = Shape.READERS.get(key)
    return reader is not None and not reader.reads(Shape.model_construct(kind=table.get("kind")))
