"""`dlm.load`: a model by bundled name, folder, GGUF file or hub id, its weights read straight to the device."""

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from dlm.errors import UserError
from dlm.models import adapters
from dlm.models.config import ModelConfig
from dlm.models.device import (
    LOWER,
    allocating,
    free_memory,
    pick_device,
    pick_dtype,
    require_room,
    whole_memory,
)
from dlm.models.draft_config import is_draft
from dlm.models.families import OTHERS, TOKENS, config_from_hub
from dlm.models.finding import find
from dlm.models.lm import LM
from dlm.models.quantise import AFTER_MERGING, Quantisation, least_bytes, quantise, require
from dlm.models.settings import first_id, generation_of, settings_of, source_of
from dlm.models.shards import weight_files
from dlm.models.subnormals import subnormals_as_zeros
from dlm.models.transformer import Transformer
from dlm.models.weights import read_network

if TYPE_CHECKING:
    from dlm.data.tokenizer import Tokenizer


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
    """A model by bundled name, folder, GGUF file or hub id, ready for inference.

    `dtype="auto"` is the checkpoint's own on an accelerator and float32 on CPU, where half precision is slow.
    `device="auto"` is cuda, else mps, else cpu. `revision` is a branch, tag or commit of a hub id.
    A GGUF file of architecture llama, qwen2, qwen3, llada or dream is unpacked, its tokenizer and chat template included,
    whatever it is quantised to (needs `dlm[gguf]`).
    `tensor_parallel` splits the layers, experts included, over so many processes of one node, started by torchrun. `adapter` is a folder
    that training left, added to the weights unless `merge` is False; given as `name`, it brings its base model along.
    `quantize="nf4"` or `"int8"` packs the layers' matrices by bitsandbytes; an adapter then stays beside them. `"q8"` is for
    a CPU: int8 with a scale for every 64 numbers, head included, rounded while the file is read (an adapter is merged first).
    `"torchao-fp8"`, `"torchao-int8"` and `"torchao-int4"` round the layers' matrices by torchao, after an adapter was merged
    (needs `dlm[quant]`; int4 wants rows in multiples of 64, and bfloat16 on a GPU).
    """
    folder = find(name, revision)
    if adapter is None and (base := adapters.base_of(folder)) is not None:
        name, adapter, folder = base, folder, find(base)
    where = pick_device(device)
    if tensor_parallel > 1 and (adapter or quantize):
        raise UserError(
            "tensor_parallel splits whole plain weights: save the model with its adapter merged, unquantised"
        )
    settings, source = settings_of(folder), str(source_of(folder))
    if not settings:
        raise UserError(f"{folder} has no config.json, so it is not a checkpoint{_files_in(folder)}")
    if is_draft(settings):  # whose model_type says "qwen3"
        raise UserError(
            f"{folder} is a draft for speculative decoding, no model: dlm.load_draft({str(name)!r}, target), or "
            f"dlm.generate(target, …, draft={str(name)!r})"
        )
    if (
        isinstance(settings.get("auto_map"), dict) and folder != Path(name).expanduser()
    ):  # the code stays where it is: on the hub
        where_code = {
            key: v if "--" in v else f"{name}--{v}" for key, v in settings["auto_map"].items() if isinstance(v, str)
        }
        settings["auto_map"] = where_code
    generation, tokenizer = generation_of(folder), _tokenizer(folder)
    if (reader := OTHERS.get(str(settings.get("model_type")))) is not None:
        if adapter or quantize or tensor_parallel > 1:
            raise UserError(
                f"{folder} is a {settings['model_type']} model: adapter, quantize and tensor_parallel are for Transformers"
            )
        kind = pick_dtype(dtype, settings, where)
        with allocating(lambda: _too_large(folder, where)):
            return resolve_name(reader)(folder, settings, source, tokenizer, str(name), where, kind)
    ids = special_ids(generation, tokenizer, source.replace("config.json", "generation_config.json"))
    config = config_from_hub(settings, source, ids)
    if quantize:
        require(quantize, where, config, pick_dtype(dtype, settings, where))
    early, late = quantize == "q8" and adapter is None, quantize in AFTER_MERGING
    if late and adapter is not None and not merge:
        raise UserError(f"quantize = {quantize!r} rounds sums of weights and adapters: leave merge=False out")
    with allocating(lambda: _too_large(folder, where)):
        if tensor_parallel > 1:
            network = _split(config, folder, where, pick_dtype(dtype, settings, where), tensor_parallel)
        else:
            first = torch.device("cpu") if quantize else where
            network = read_network(config, folder, first, pick_dtype(dtype, settings, where), early)
        if quantize and where.type == "cuda":
            require_room(least_bytes(network, quantize), where, f"{folder} as {quantize}")
        lm = LM(network.eval(), tokenizer, str(name), settings, generation)
        if quantize and not late:
            quantise(network, quantize, where)
        if adapter is not None:
            adapters.load(lm, find(adapter), merged=merge and (late or not quantize))
        if quantize and late and not early:
            quantise(network, quantize, where)
    return lm


def _too_large(folder: Path, device: torch.device) -> str:
    """What to say where a device's memory was free and then was not, or what was read stood beside what it became."""
    size = sum(file.stat().st_size for file in weight_files(folder))
    return (
        f"{folder}: {device} ran out of memory while {size / 2**30:,.1f} GiB of weights were read: "
        f"{free_memory(device) / 2**30:,.1f} GiB of {whole_memory(device) / 2**30:,.1f} are left; {LOWER}"
    )


def _split(config: ModelConfig, folder: Path, device: torch.device, dtype: torch.dtype, size: int) -> Transformer:
    """This process's share of the network; the whole passes through the host's memory."""
    from dlm.models.parallel import check_divisible, join, parallelise

    check_divisible(config, size)
    mesh, own = join(size, device)
    return parallelise(read_network(config, folder, torch.device("cpu"), dtype), mesh, own)


def config_of(name: str | Path) -> ModelConfig:
    """The shape of what `load` takes by this name, without its weights; of an adapter, its base model's."""
    folder = find(name)
    folder = find(adapters.base_of(folder) or folder)
    return config_from_hub(settings_of(folder), str(source_of(folder)))


def special_ids(
    generation: Mapping[str, Any], tokenizer: "Tokenizer | None", source: str = "generation_config.json"
) -> dict[str, int | None]:
    """Mask, end-of-text and padding as generation_config.json says, or else the tokenizer."""
    found = {key: first_id(generation.get(key), source, key) for key in TOKENS}
    return {key: getattr(tokenizer, key, None) if token is None else token for key, token in found.items()}


def _files_in(folder: Path) -> str:
    """What to give instead of a folder that holds GGUF files alone."""
    there = sorted(folder.glob("*.gguf"))
    return f": give the file, {there[0]}{f' or another of {len(there)}' * (len(there) > 1)}" if there else ""


def _tokenizer(folder: Path) -> "Tokenizer | None":
    from dlm.data.tokenizer import has_vocabulary, load_tokenizer

    return load_tokenizer(folder) if has_vocabulary(folder) else None
