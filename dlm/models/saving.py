"""`dlm.save`: a model's folder in the hub's layout, written whole or not at all."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from dlm.errors import UserError
from dlm.models import adapters
from dlm.models.config import ModelConfig
from dlm.models.device import DTYPES
from dlm.models.engines import require_served
from dlm.models.families import FAMILIES, config_from_hub, config_to_hub, family_of
from dlm.models.folder import replacing
from dlm.models.portable import AUTO_MAP, hub_code, local_code, write_code
from dlm.models.quantise import is_quantised
from dlm.models.required import require_lm
from dlm.models.settings import read_json
from dlm.models.weights import write_weights

if TYPE_CHECKING:
    from dlm.models.lm import LM

NATIVE = ("qwen2", "qwen3", "llama")
"""Families that transformers has itself."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")


def save(
    lm: "LM",
    folder: str | Path,
    family: str | None = None,
    *,
    dtype: str | None = None,
    max_shard_size: int = 5 * 10**9,
    code: bool = True,
    overwrite: bool = False,
    engine: str | None = None,
) -> None:
    """Write a checkpoint that `dlm.load` and transformers read: config, weights, tokenizer, generation config.

    `family` is the layout: "llama", "qwen2" or "qwen3" for a causal model that transformers runs by itself, a published
    diffusion family ("llada", "sdar", …) for that family's own code, "dlm" for any network. By default it is the model's
    own family, or "dlm" where that family cannot express the network, as after `convert`. With `code`, a "dlm" folder
    holds modelling code too, and `AutoModel.from_pretrained(folder, trust_remote_code=True)` reads it without this package.
    `engine` ("sglang", "lmdeploy") is another program that is to serve the folder: what it would refuse, or decode
    wrongly, is not written. Weights are stored in `dtype` (default: as they are), in shards of at most `max_shard_size` bytes. Adapters that are
    not merged are written alone, in peft's format.

    All files are made and synced in a temporary folder, then moved into place: an interrupted save leaves what was there.
    An earlier checkpoint in `folder` is replaced. A folder that holds other files and no checkpoint is refused unless
    `overwrite`. UserError also for a family that cannot express the network, for quantised weights, and for a folder
    that cannot be written.
    """
    require_lm(lm, "save()")
    folder = Path(folder)
    kind = lm.dtype if dtype is None else DTYPES.get(dtype)
    if kind is None:
        raise UserError(f"dtype={dtype!r} is not known; use {', '.join(DTYPES)}")
    if lm.network.group is not None:
        raise UserError(f"model {lm.name!r} is split over processes: load it with tensor_parallel=1, then save it")
    if adapters.is_adapted(lm.network):
        if family is not None:
            raise UserError(
                f"family = {family!r}: model {lm.name!r} has adapters that are not merged; load it with merge=True, or leave "
                "family out to save the adapters alone"
            )
        return _save_adapters(lm, folder, dtype or "float32", overwrite)
    if is_quantised(lm.network):
        raise UserError(f"model {lm.name!r} is quantised, which no family's layout can say: save it before that")
    config = portable(lm.config) if family is None else belonging(lm.config, family)
    with replacing(folder, overwrite) as work:
        write_settings(lm, config, work, kind, code)
        if engine is not None:
            require_served(work, engine)
        write_weights(lm.network, config, work, kind, max_shard_size)


def _save_adapters(lm: "LM", folder: Path, dtype: str, overwrite: bool) -> None:
    """The adapters alone, in peft's format, with config and tokenizer of what they were trained on."""
    found = adapters.require().get_peft_model_state_dict(lm.network, save_embedding_layers=False)
    weights = {adapters.OUTER + name: w.detach().to("cpu", DTYPES[dtype]).contiguous() for name, w in found.items()}
    settings: Any = lm.network.peft_config
    with replacing(folder, overwrite) as work:
        write_settings(lm, portable(lm.config), work, lm.dtype)
        save_file(weights, work / adapters.WEIGHTS)
        settings["default"].save_pretrained(str(work))


def write_settings(lm: "LM", config: ModelConfig, folder: Path, dtype: torch.dtype, code: bool = False) -> None:
    """Everything but the weights."""
    settings = hub_settings(lm, config, dtype)
    if code and config.model_type == "dlm":
        settings["auto_map"] = AUTO_MAP
        write_code(folder)
    elif lm.settings and family_of(lm.settings) == config.model_type:  # the checkpoint's own code goes along
        for file in (files := local_code(lm.settings.get("auto_map"), Path(lm.name))):
            shutil.copyfile(file, folder / file.name)
        if files:
            settings["auto_map"] = lm.settings["auto_map"]
    _write_json(folder / "config.json", settings)
    _write_json(folder / "generation_config.json", _generation(lm))
    if lm.tokenizer is not None:
        lm.tokenizer.save(folder)


def readers(folder: Path) -> str:
    """How transformers reads a saved checkpoint, in one line for a user."""
    hub = read_json(folder / "config.json")
    family, where = family_of(hub), str(folder)
    if family in NATIVE:
        return f"family {family}, AutoModelForCausalLM.from_pretrained({where!r})"
    distant = hub_code(hub.get("auto_map"))
    if distant or local_code(hub.get("auto_map"), folder):
        fetched = ", which fetches the family's code from the hub" if distant else ""
        return f"family {family}, AutoModel.from_pretrained({where!r}, trust_remote_code=True){fetched}"
    return f"family {family}, dlm.load({where!r}) or the family's published code; --family dlm brings code along"


def portable(config: ModelConfig) -> ModelConfig:
    """The config in a family that can express all of it."""
    same = config_from_hub(config_to_hub(config)) == config
    return config if same else config.model_copy(update={"model_type": "dlm"})


def belonging(config: ModelConfig, family: str) -> ModelConfig:
    """The config as one of `family`, with that family's attention; UserError where the family cannot express it."""
    if family not in FAMILIES:
        raise UserError(f"family = {family!r} is not known; known: {', '.join(FAMILIES)}")
    own = FAMILIES[family]
    if own.attention == "block_causal" and config.block_length is None:
        raise UserError(
            f"family = {family!r} decodes block by block, and this model has no block_length: "
            "dlm.models.convert(lm, 'block_causal', block_length=32) makes it one that does"
        )
    changes: dict[str, Any] = {"model_type": family}
    if family != "dlm":  # whose config states them
        changes |= {"attention": own.attention, "mask_in_softmax": own.mask_in_softmax}
        changes |= {} if own.attention == "block_causal" else {"block_length": None}
    written = config.model_copy(update=changes)
    read = config_from_hub(config_to_hub(written))
    lost = [key for key in ModelConfig.model_fields if getattr(read, key) != getattr(written, key)]
    if lost:
        stated = ", ".join(f"{key} = {getattr(written, key)!r}" for key in lost)
        raise UserError(f"family = {family!r} cannot say {stated}: leave family out, and the model is saved as `dlm`")
    return written


def hub_settings(lm: "LM", config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json: our settings, merged over the original's, whose other keys stay."""
    kept = lm.settings if lm.settings and family_of(lm.settings) == config.model_type else {}
    hub = {**kept, **config_to_hub(config)}
    if "architectures" in kept:
        hub["architectures"] = kept["architectures"]
    if "embedding_size" in hub:  # the vocabulary before padding is not ours to change
        hub["vocab_size"] = kept.get("vocab_size", hub["vocab_size"])
    for key in IDS:
        if isinstance(kept.get(key), list) and hub.get(key) in kept[key]:
            hub[key] = kept[key]
    if config.model_type == "dlm":  # whose code lies in the folder, and is not there yet
        hub.pop("auto_map", None)
    for key in ("rope_parameters", "dtype"):  # keep only the spelling that every version of transformers reads
        hub.pop(key, None)
    return {**hub, "torch_dtype": str(dtype).removeprefix("torch.")}


def _generation(lm: "LM") -> dict[str, Any]:
    ids = {key: getattr(lm.config, key, None) for key in IDS}
    return {**{key: value for key, value in ids.items() if value is not None}, **lm.generation}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
