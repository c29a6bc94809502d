"""Checkpoints in the hub's layout, read straight to the device. Knows nothing of families beyond their dict."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlm.errors import UserError
from dlm.models import adapters
from dlm.models.config import ModelConfig
from dlm.models.families import FAMILIES, TOKENS, config_from_hub
from dlm.models.finding import find
from dlm.models.layout import HubTensor, hub_layout
from dlm.models.lm import LM
from dlm.models.quantise import Quantisation, quantise, require
from dlm.models.settings import first_id, read_json
from dlm.models.subnormals import subnormals_as_zeros
from dlm.models.transformer import Transformer

if TYPE_CHECKING:
    from dlm.data.tokenizer import Tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@subnormals_as_zeros()
def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    tensor_parallel: int = 1,
    adapter: str | Path | None = None,
    merge: bool = True,
    quantize: Quantisation | None = None,
) -> LM:
    """A model by bundled name, folder or hub id, ready for inference.

    `dtype="auto"` is the checkpoint's own on an accelerator and float32 on CPU, where half precision is slow.
    `device="auto"` is cuda, else mps, else cpu. `revision` is a branch, tag or commit of a hub id.
    `tensor_parallel` splits the layers over so many processes of one node, started by torchrun. `adapter` is a folder
    that training left, added to the weights unless `merge` is False; given as `name`, it brings its base model along.
    `quantize="nf4"` or `"int8"` packs the layers' matrices by bitsandbytes; an adapter then stays beside them.
    """
    folder = find(name, revision)
    if adapter is None and (base := adapters.base_of(folder)) is not None:
        name, adapter, folder = base, folder, find(base)
    where = pick_device(device)
    if tensor_parallel > 1 and (adapter or quantize):
        raise UserError(
            "tensor_parallel splits whole plain weights: save the model with its adapter merged, unquantised"
        )
    settings = read_json(folder / "config.json")
    if not settings:
        raise UserError(f"{folder} has no config.json, so it is not a checkpoint")
    if "auto_map" in settings and folder != Path(name).expanduser():  # the code stays where it is: on the hub
        where_code = {
            key: v if "--" in v else f"{name}--{v}" for key, v in settings["auto_map"].items() if isinstance(v, str)
        }
        settings["auto_map"] = where_code
    generation, tokenizer = read_json(folder / "generation_config.json"), _tokenizer(folder)
    config = config_from_hub(settings, str(folder / "config.json"), special_ids(generation, tokenizer))
    if quantize:
        require(quantize, where, config)
    if tensor_parallel > 1:
        network = _split(config, folder, where, pick_dtype(dtype, settings, where), tensor_parallel)
    else:
        network = read_network(
            config, folder, torch.device("cpu") if quantize else where, pick_dtype(dtype, settings, where)
        )
    lm = LM(network.eval(), tokenizer, str(name), settings, generation)
    if quantize:
        quantise(network, quantize, where)
    if adapter is not None:
        adapters.load(lm, find(adapter), merged=merge and not quantize)
    return lm


def _split(config: ModelConfig, folder: Path, device: torch.device, dtype: torch.dtype, size: int) -> Transformer:
    """This process's share of the network; the whole passes through the host's memory."""
    from dlm.models.parallel import check_divisible, join, parallelise

    check_divisible(config, size)
    mesh, own = join(size, device)
    return parallelise(read_network(config, folder, torch.device("cpu"), dtype), mesh, own)


def config_of(name: str | Path) -> ModelConfig:
    """The shape of a model by bundled name, folder or hub id, without its weights; of an adapter, its base model's."""
    folder = find(name)
    folder = find(adapters.base_of(folder) or folder)
    return config_from_hub(read_json(folder / "config.json"), str(folder / "config.json"))


def special_ids(generation: Mapping[str, Any], tokenizer: "Tokenizer | None") -> dict[str, int | None]:
    """Mask, end-of-text and padding as generation_config.json says, or else the tokenizer."""
    found = {key: first_id(generation.get(key)) for key in TOKENS}
    return {key: getattr(tokenizer, key, None) if token is None else token for key, token in found.items()}


def pick_device(device: str | torch.device) -> torch.device:
    """A usable device, or an error that says which ones are."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device={str(device)!r} cannot be used here ({reason}); use auto, cpu, cuda or mps") from error
    return torch.device("cpu") if found.type == "cpu" else found  # safetensors knows no "cpu:0"


def pick_dtype(dtype: str | torch.dtype, settings: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """The dtype of the weights in memory."""
    if isinstance(dtype, torch.dtype):
        return dtype
    stated = "float32" if device.type == "cpu" else settings.get("dtype") or settings.get("torch_dtype") or "float32"
    name = str(stated if dtype == "auto" else dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype={name!r} is not known; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def read_network(config: ModelConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The network with its weights: one copy in memory, converted tensor by tensor on the way in."""
    with torch.device("meta"):
        network = Transformer(config)
    network.to(dtype)
    for buffer in network.buffers():  # the router's bias decides between close experts: never rounded
        buffer.data = buffer.data.float()
    network.to_empty(device=device)
    ours = network.state_dict()
    files = weight_files(folder)
    layout = _layout(config, files, ours)
    missing = dict(layout)
    for file in files:
        with _open(file, device) as shard:
            for hub in shard.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                if hub in layout:
                    missing.pop(hub, None)
                    _check_shape(hub, layout[hub], shard.get_slice(hub).get_shape(), file)
                    _copy(shard.get_tensor(hub), layout[hub], ours)
                elif not _harmless(hub, config):
                    raise UserError(
                        f"{file} has a tensor {hub!r} that a {config.model_type} network of this config has not"
                    )
    if missing:
        hub, tensor = next(iter(missing.items()))
        raise UserError(
            f"{folder} lacks {len(missing)} of {len(layout)} tensors, first {hub!r} of shape {tensor.shape}"
        )
    return network


def _layout(config: ModelConfig, files: list[Path], ours: Mapping[str, Tensor]) -> dict[str, HubTensor]:
    """The family's spelling of the weights that has most in common with the checkpoint."""
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    layouts = [hub_layout(names, shapes) for names in FAMILIES[config.model_type].names]
    if len(layouts) == 1:
        return layouts[0]
    found: set[str] = set()
    for file in files:
        with _open(file, torch.device("cpu")) as shard:
            found.update(shard.keys())
    return max(layouts, key=lambda layout: len(found & set(layout)) / len(layout))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(f"{folder / INDEX} has no weight_map")
        files = [folder / name for name in sorted(set(shards.values()))]
        for file in files:
            if not file.is_file():
                raise UserError(f"{file} is missing, but {INDEX} lists it: download or copy the checkpoint again")
        return files
    if any(folder.glob("pytorch_model*.bin")):
        raise UserError(f"{folder} has only pytorch_model.bin weights; convert them to safetensors first")
    raise UserError(f"{folder} has no {WEIGHTS} and no {INDEX}")


@contextmanager
def _open(file: Path, device: torch.device) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device=str(device)) as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a whole safetensors file: {error}; download or copy it again") from error


def _check_shape(hub: str, tensor: HubTensor, found: list[int], file: Path) -> None:
    if tuple(found) != tensor.shape:
        raise UserError(f"{file}: tensor {hub!r} has shape {tuple(found)}; config.json asks for {tensor.shape}")


@torch.no_grad()
def _copy(source: Tensor, tensor: HubTensor, ours: Mapping[str, Tensor]) -> None:
    row = 0
    for part in tensor.parts:
        target = ours[part.ours][part.index].narrow(part.axis, part.start, part.length)
        target.copy_(source.narrow(part.axis, row, part.length))
        row += part.length


def _harmless(hub: str, config: ModelConfig) -> bool:
    """Buffers that some versions stored, and the output head of a tied network stored twice."""
    head = FAMILIES[config.model_type].names[0]["lm_head"]
    return hub.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and hub == f"{head}.weight")


def _tokenizer(folder: Path) -> "Tokenizer | None":
    from dlm.data.tokenizer import has_vocabulary, load_tokenizer

    return load_tokenizer(folder) if has_vocabulary(folder) else None
