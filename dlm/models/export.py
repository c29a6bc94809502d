"""Checkpoints written in the hub's layout, whole or not at all. Knows nothing of training."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dlm.errors import UserError
from dlm.models.config import ModelConfig
from dlm.models.families import FAMILIES, config_from_hub, config_to_hub, family_of
from dlm.models.layout import HubTensor, hub_layout
from dlm.models.lm import LM, require_lm
from dlm.models.loading import DTYPES, INDEX, WEIGHTS
from dlm.models.quantise import is_quantised

IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")


def save(
    lm: LM,
    folder: str | Path,
    *,
    dtype: str | None = None,
    family: str | None = None,
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Write config, weights (in `dtype`, sharded above `max_shard_size` bytes), tokenizer and generation config.

    The files are made and synced in a temporary folder beside `folder`, then moved into place, so that an interrupted
    save leaves what was there. A configuration that its family cannot express is written as family `dlm`; with `family`
    the weights go under that family's own attention, as a converted Qwen3 into one that transformers runs as causal.
    """
    require_lm(lm, "save()")
    folder = Path(folder)
    kind = lm.dtype if dtype is None else DTYPES.get(dtype)
    if kind is None:
        raise UserError(f"dtype={dtype!r} is not known; use {', '.join(DTYPES)}")
    if is_quantised(lm.network):
        raise UserError(f"model {lm.name!r} is quantised, which no family's layout can say: save it before that")
    config = portable(lm.config) if family is None else belonging(lm.config, family)
    with replacing(folder) as work:
        write_settings(lm, config, work, kind)
        write_weights(lm, config, work, kind, max_shard_size)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, whose files take their places there at the end, unless an error ends it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        yield work
        _publish(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_settings(lm: LM, config: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    """Everything but the weights."""
    _write_json(folder / "config.json", hub_settings(lm, config, dtype))
    _write_json(folder / "generation_config.json", _generation(lm))
    if lm.tokenizer is not None:
        lm.tokenizer.save(folder)


def portable(config: ModelConfig) -> ModelConfig:
    """The same network in a family that can say all of it."""
    same = config_from_hub(config_to_hub(config)) == config
    return config if same else config.model_copy(update={"model_type": "dlm"})


def belonging(config: ModelConfig, family: str) -> ModelConfig:
    """The same weights as a checkpoint of `family`, under that family's attention; an error where it has no room."""
    if family not in FAMILIES:
        raise UserError(f"family = {family!r} is not known; known: {', '.join(FAMILIES)}")
    own = FAMILIES[family]
    changes: dict[str, Any] = {"model_type": family}
    if family != "dlm":  # which says everything itself
        changes |= {"attention": own.attention, "mask_in_softmax": own.mask_in_softmax}
        changes |= {} if own.attention == "block_causal" else {"block_length": None}
    asked = config.model_copy(update=changes)
    read = config_from_hub(config_to_hub(asked))
    lost = [key for key in ModelConfig.model_fields if getattr(read, key) != getattr(asked, key)]
    if lost:
        stated = ", ".join(f"{key} = {getattr(asked, key)!r}" for key in lost)
        raise UserError(f"family = {family!r} cannot say {stated}: leave family out, and the model is saved as `dlm`")
    return asked


def hub_settings(lm: LM, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json: our settings over the keys of the original that we have no use for."""
    kept = lm.settings if lm.settings and family_of(lm.settings) == config.model_type else {}
    hub = {**kept, **config_to_hub(config)}
    if "architectures" in kept:
        hub["architectures"] = kept["architectures"]
    if "embedding_size" in hub:  # the vocabulary before padding is not ours to change
        hub["vocab_size"] = kept.get("vocab_size", hub["vocab_size"])
    for key in IDS:
        if isinstance(kept.get(key), list) and hub.get(key) in kept[key]:
            hub[key] = kept[key]
    for key in ("rope_parameters", "dtype"):  # said once: in the spelling that every version of transformers reads
        hub.pop(key, None)
    return {**hub, "torch_dtype": str(dtype).removeprefix("torch.")}


def write_weights(lm: LM, config: ModelConfig, folder: Path, dtype: torch.dtype, max_shard_size: int) -> None:
    """model.safetensors, or shards with an index; one shard at a time in memory beside the network."""
    ours = lm.network.state_dict()
    layout = hub_layout(FAMILIES[config.model_type].names[0], {name: tuple(p.shape) for name, p in ours.items()})
    kinds = {hub: _kind(tensor, dtype) for hub, tensor in layout.items()}
    sizes = {hub: kinds[hub].itemsize * torch.Size(tensor.shape).numel() for hub, tensor in layout.items()}
    shards: list[list[str]] = [[]]
    room = max_shard_size
    for hub, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_size
        shards[-1].append(hub)
        room -= size
    names = [
        WEIGHTS if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]
    for name, hubs in zip(names, shards, strict=True):
        tensors = {hub: gather(layout[hub], ours, kinds[hub]) for hub in hubs}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        where = {hub: name for name, hubs in zip(names, shards, strict=True) for hub in hubs}
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})


def gather(tensor: HubTensor, ours: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """One hub tensor from the parts of ours that it holds."""
    pieces = [ours[p.ours][p.index].narrow(p.axis, p.start, p.length) for p in tensor.parts]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=tensor.parts[0].axis)
    return whole.to("cpu", dtype).contiguous()


def _kind(tensor: HubTensor, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if any(p.ours.endswith("router.bias") for p in tensor.parts) else dtype


def _generation(lm: LM) -> dict[str, Any]:
    ids = {key: getattr(lm.config, key, None) for key in IDS}
    return {**{key: value for key, value in ids.items() if value is not None}, **lm.generation}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _publish(work: Path, folder: Path) -> None:
    """Sync everything, then rename: the whole folder when it is new, else file by file, config.json last."""
    files = sorted(work.iterdir(), key=lambda path: (path.name == "config.json", path.suffix == ".json", path.name))
    for path in files:
        os.chmod(path, 0o644)  # safetensors writes for its owner alone
    for path in [*files, work]:
        _sync(path)
    if not folder.exists():
        os.chmod(work, 0o755)
        os.rename(work, folder)
    else:
        stale = {path.name for path in (*folder.glob("model*.safetensors"), *folder.glob(INDEX))}
        for path in files:
            os.replace(path, folder / path.name)
        for name in stale - {path.name for path in files}:
            (folder / name).unlink()
        _sync(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
