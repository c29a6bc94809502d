"""Reads a network's weights from safetensors or GGUF files, and writes them to safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dlm.data.gguf import is_gguf
from dlm.errors import UserError
from dlm.models import gguf_weights, int8
from dlm.models.config import ModelConfig
from dlm.models.device import bytes_of, require_room
from dlm.models.families import FAMILIES
from dlm.models.hub_tensors import HubTensor, Names, hub_layout
from dlm.models.settings import source_of
from dlm.models.shards import INDEX, KINDS, WEIGHTS, Declared, declared, opened, weight_files
from dlm.models.transformer import Transformer


def read_network(
    config: ModelConfig, folder: Path, device: torch.device, dtype: torch.dtype, rounded: bool = False
) -> Transformer:
    """The network with its weights: one copy in memory, converted tensor by tensor on the way in, to int8 if `rounded`.

    What the files declare is compared with `config` before anything is built or memory is allocated.
    """
    files = weight_files(folder)
    found = declared(files)
    if config.num_hidden_layers > len(found):
        raise UserError(
            f"{folder} holds {len(found)} tensors: too few for the num_hidden_layers={config.num_hidden_layers} of its "
            f"{_said_in(folder)}"
        )
    spellings = _spellings(config, found, folder)
    try:
        with torch.device("meta"):
            network = Transformer(config)
    except UserError as error:  # impossible rotary frequencies
        raise UserError(f"{source_of(folder)}: {error}") from error
    network.to(dtype)
    for buffer in network.buffers():  # the router's bias decides between close experts: never rounded
        buffer.data = buffer.data.float()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    layouts = [hub_layout(names, shapes) for names in spellings]
    layout = max(layouts, key=lambda layout: len(found.keys() & layout.keys()) / len(layout))
    _check(layout, found, config, folder)
    rows = {name: shape[0] for name, shape in shapes.items() if shape}
    small = int8.replace(network) if rounded else {}
    require_room(bytes_of(network), device, folder)
    _allocate(network, device)
    ours, written = network.state_dict(), dict.fromkeys(small, 0)
    for file in files:
        with opened(file, device) as shard:
            for hub in shard.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                if hub in layout:
                    for part in layout[hub].parts:
                        if part.ours in small and part.ours not in ours:
                            ours[part.ours] = torch.empty(shapes[part.ours], dtype=dtype)
                    pieces = getattr(shard, "pieces", None)
                    for start, piece in pieces(hub) if pieces else [(0, shard.get_tensor(hub))]:
                        _copy(piece, start, layout[hub], ours)
                    for part in layout[hub].parts:
                        if part.ours in small:
                            written[part.ours] += part.length
                            if written[part.ours] == rows[part.ours]:
                                small[part.ours].take(ours.pop(part.ours))
    if rounded:
        int8.round_tied_head(network)
    return network


def _allocate(network: Transformer, device: torch.device) -> None:
    """Memory for all of it, not written. (`to_empty` asks the meta device, which imports sympy: 0.6 s.)"""
    for module in network.modules():
        for name, old in module._parameters.items():
            if old is not None:
                new = torch.empty(old.shape, dtype=old.dtype, device=device)
                module._parameters[name] = torch.nn.Parameter(new, old.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _spellings(config: ModelConfig, found: Mapping[str, Declared], folder: Path) -> list[Names]:
    """The family's spellings of the weights, without those that need far more tensors than there are."""
    moe = config.moe
    experts = 0 if moe is None else moe.num_experts * max(0, config.num_hidden_layers - moe.first_k_dense)
    spellings = (gguf_weights.NAMES,) if is_gguf(folder) else FAMILIES[config.model_type].names
    left = [names for names in spellings if experts <= len(found) or not any("#" in str(hub) for hub in names.values())]
    if not left:
        raise UserError(f"{folder} holds {len(found)} tensors: too few for the {experts} experts of its config.json")
    return left


def _check(layout: Mapping[str, HubTensor], found: Mapping[str, Declared], config: ModelConfig, folder: Path) -> None:
    """Raise UserError unless every tensor is there, of the shape that the config means and of a supported kind."""
    for hub, tensor in found.items():
        if hub not in layout:
            if _harmless(hub, config):
                continue
            raise UserError(
                f"{tensor.file} has a tensor {hub!r} that a {config.model_type} network of this config has not"
            )
        if tensor.shape != layout[hub].shape:
            raise UserError(
                f"{tensor.file}: tensor {hub!r} has shape {tensor.shape}; {_said_in(folder)} asks for {layout[hub].shape}"
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


@torch.no_grad()
def _copy(source: Tensor, start: int, tensor: HubTensor, ours: Mapping[str, Tensor]) -> None:
    """Runs of a hub tensor's first axis, from number `start` on, to where they belong."""
    first = 0
    for part in tensor.parts:
        target = ours[part.ours][part.index].narrow(part.axis, part.start, part.length)
        if part.axis > 0:
            target.narrow(0, start, len(source)).copy_(source.narrow(part.axis, first, part.length))
        elif (low := max(first, start)) < (high := min(first + part.length, start + len(source))):
            target.narrow(0, low - first, high - low).copy_(source.narrow(0, low - start, high - low))
        first += part.length


def _said_in(folder: Path) -> str:
    """The name of a checkpoint's settings, for messages."""
    return "metadata" if is_gguf(folder) else "config.json"


def _harmless(hub: str, config: ModelConfig) -> bool:
    """Whether a superfluous tensor may be ignored: stored buffers, and the output head of a tied network."""
    head = FAMILIES[config.model_type].names[0]["lm_head"]
    return hub.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and hub == f"{head}.weight")


def write_weights(
    network: Transformer, config: ModelConfig, folder: Path, dtype: torch.dtype, max_shard_size: int
) -> None:
    """model.safetensors, or shards with an index; one shard at a time in memory beside the network."""
    ours = network.state_dict()
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
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def gather(tensor: HubTensor, ours: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """One hub tensor from the parts of ours that it holds."""
    pieces = [ours[p.ours][p.index].narrow(p.axis, p.start, p.length) for p in tensor.parts]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=tensor.parts[0].axis)
    return whole.to("cpu", dtype).contiguous()


def _kind(tensor: HubTensor, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if any(p.ours.endswith("router.bias") for p in tensor.parts) else dtype
