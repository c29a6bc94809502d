"""Checkpoints in the hub's layout, read straight to the device. Knows nothing of families beyond their dict."""

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlm.errors import UserError
from dlm.models import adapters
from dlm.models.config import ModelConfig
from dlm.models.families import FAMILIES, TOKENS, config_from_hub
from dlm.models.finding import find
from dlm.models.layout import HubTensor, Names, hub_layout
from dlm.models.lm import LM
from dlm.models.quantise import Quantisation, quantise, require
from dlm.models.settings import first_id, read_json
from dlm.models.shards import INDEX as INDEX
from dlm.models.shards import KINDS, Declared, declared, opened, weight_files
from dlm.models.shards import WEIGHTS as WEIGHTS
from dlm.models.subnormals import subnormals_as_zeros
from dlm.models.transformer import Transformer

if TYPE_CHECKING:
    from dlm.data.tokenizer import Tokenizer

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
    if (
        isinstance(settings.get("auto_map"), dict) and folder != Path(name).expanduser()
    ):  # the code stays where it is: on the hub
        where_code = {
            key: v if "--" in v else f"{name}--{v}" for key, v in settings["auto_map"].items() if isinstance(v, str)
        }
        settings["auto_map"] = where_code
    generation, tokenizer = read_json(folder / "generation_config.json"), _tokenizer(folder)
    ids = special_ids(generation, tokenizer, str(folder / "generation_config.json"))
    config = config_from_hub(settings, str(folder / "config.json"), ids)
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


def special_ids(
    generation: Mapping[str, Any], tokenizer: "Tokenizer | None", source: str = "generation_config.json"
) -> dict[str, int | None]:
    """Mask, end-of-text and padding as generation_config.json says, or else the tokenizer."""
    found = {key: first_id(generation.get(key), source, key) for key in TOKENS}
    return {key: getattr(tokenizer, key, None) if token is None else token for key, token in found.items()}


def pick_device(device: str | torch.device) -> torch.device:
    """A usable device, or an error that says which ones are."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
        if found.type == "meta":
            raise RuntimeError("it holds no data")
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
        raise UserError(f"dtype={reprlib.repr(name)} is not known; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def stored_dtype(folder: Path) -> str:
    """The dtype that a checkpoint says its weights have."""
    settings = read_json(folder / "config.json")
    name = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in DTYPES else "float32"


def read_network(config: ModelConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The network with its weights: one copy in memory, converted tensor by tensor on the way in.

    What the files declare is compared with `config` before anything is built or memory is allocated.
    """
    files = weight_files(folder)
    found = declared(files)
    if config.num_hidden_layers > len(found):
        raise UserError(
            f"{folder} holds {len(found)} tensors: too few for the num_hidden_layers={config.num_hidden_layers} of its "
            "config.json"
        )
    spellings = _spellings(config, found, folder)
    try:
        with torch.device("meta"):
            network = Transformer(config)
    except UserError as error:  # rotary frequencies that cannot be
        raise UserError(f"{folder / 'config.json'}: {error}") from error
    network.to(dtype)
    for buffer in network.buffers():  # the router's bias decides between close experts: never rounded
        buffer.data = buffer.data.float()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    layouts = [hub_layout(names, shapes) for names in spellings]
    layout = max(layouts, key=lambda layout: len(found.keys() & layout.keys()) / len(layout))
    _check(layout, found, config, folder)
    require_room(network, device, folder)
    network.to_empty(device=device)
    ours = network.state_dict()
    for file in files:
        with opened(file, device) as shard:
            for hub in shard.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                if hub in layout:
                    _copy(shard.get_tensor(hub), layout[hub], ours)
    return network


def _spellings(config: ModelConfig, found: Mapping[str, Declared], folder: Path) -> list[Names]:
    """The family's spellings of the weights, without those that need far more tensors than there are."""
    moe = config.moe
    experts = 0 if moe is None else moe.num_experts * max(0, config.num_hidden_layers - moe.first_k_dense)
    spellings = FAMILIES[config.model_type].names
    left = [names for names in spellings if experts <= len(found) or not any("#" in str(hub) for hub in names.values())]
    if not left:
        raise UserError(f"{folder} holds {len(found)} tensors: too few for the {experts} experts of its config.json")
    return left


def _check(layout: Mapping[str, HubTensor], found: Mapping[str, Declared], config: ModelConfig, folder: Path) -> None:
    """Every tensor is there, has the shape that the config means, and is of a kind that holds weights."""
    for hub, tensor in found.items():
        if hub not in layout:
            if _harmless(hub, config):
                continue
            raise UserError(
                f"{tensor.file} has a tensor {hub!r} that a {config.model_type} network of this config has not"
            )
        if tensor.shape != layout[hub].shape:
            raise UserError(
                f"{tensor.file}: tensor {hub!r} has shape {tensor.shape}; config.json asks for {layout[hub].shape}"
            )
        if tensor.kind not in KINDS:
            raise UserError(
                f"{tensor.file}: tensor {hub!r} is stored as {tensor.kind}; weights are read from {', '.join(KINDS)}: "
                "load a checkpoint that is not quantised"
            )
    missing = [hub for hub in layout if hub not in found]
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing)} of {len(layout)} tensors, first {missing[0]!r} of shape "
            f"{layout[missing[0]].shape}"
        )


def require_room(
    network: Transformer,
    device: torch.device,
    source: str | Path,
    fix: str = "use a smaller dtype, or tensor_parallel over several devices",
) -> None:
    """An error where the weights take more memory than the device has in all; `fix` says what helps."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > there:
        raise UserError(
            f"{source}: the weights take {needed / 2**30:,.1f} GiB, and {device} has {there / 2**30:,.1f} GiB in all; "
            f"{fix}"
        )


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
