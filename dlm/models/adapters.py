"""LoRA adapters on a network, through peft: attach, load, merge. `saving` writes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn

from dlm.errors import UserError
from dlm.models.adapter_settings import check_weights, lora_settings
from dlm.models.attention import Attention
from dlm.models.converting import convert
from dlm.models.families import config_from_hub
from dlm.models.gated import SwiGLU
from dlm.models.quantise import is_quantised, quiet
from dlm.models.settings import read_json
from dlm.models.transformer import Transformer

if TYPE_CHECKING:
    from peft import LoraConfig

    from dlm.models.lm import LM

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every linear layer of attention and feed-forward, by our names."""
CONVERTED = ("attention", "block_length", "mask_token_id")
OUTER = "base_model.model.network."
"""The prefix of our names in peft's files, which then also fit `peft.PeftModel` around `dlm.models.hf.wrap(lm)`."""


def attach(
    network: Transformer,
    r: int,
    alpha: float,
    dropout: float = 0.0,
    targets: Sequence[str] = PROJECTIONS,
    base: str = "",
) -> None:
    """New adapters beside the linear layers whose names end in one of `targets`; only they will be trained."""
    settings = {"r": r, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": list(targets)}
    _inject(network, require().LoraConfig(**settings, base_model_name_or_path=base), "adapter.targets")
    for parameter in network.parameters():
        if parameter.requires_grad:  # peft uses the dtype of the adapted weights
            parameter.data = parameter.data.float()


def require() -> Any:
    """peft, or an error that says how to get it."""
    quiet()  # peft imports bitsandbytes where it is installed
    try:
        import peft
    except ImportError as error:
        raise UserError(f"adapters need peft: pip install 'dlm[qlora]' ({error})") from error
    return peft


def _inject(network: Transformer, settings: "LoraConfig", source: str) -> None:
    for module in network.modules():
        if isinstance(module, Attention | SwiGLU):
            module.packed = None  # of weights that are now one part of a layer
    for question in ("is_loaded_in_4bit", "is_loaded_in_8bit"):  # attributes that peft reads of a model
        setattr(network, question, is_quantised(network))
    try:
        require().inject_adapter_in_model(settings, network)
    except ValueError as error:
        linear = (name for name, module in network.layers.named_modules() if isinstance(module, nn.Linear))
        names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise UserError(f"{source}: {error}; this network's linear layers are {names}") from error


def is_adapted(network: nn.Module) -> bool:
    return hasattr(network, "peft_config")


def base_of(folder: Path) -> str | None:
    """The model that the adapter in `folder` belongs to; None where there is no adapter, or whole weights beside it."""
    if not (folder / SETTINGS).is_file() or any(folder.glob("model*.safetensors")):
        return None
    base = read_json(folder / SETTINGS).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UserError(f'{folder} holds an adapter of an unnamed model: load that one, with adapter="{folder}"')
    return base


def load(lm: "LM", folder: Path, merged: bool = True) -> None:
    """Attach the adapters in `folder` to their base model, in place, or merge them into it.

    A base that training converted (another attention, a mask token) is converted here in the same way.
    """
    if not (folder / SETTINGS).is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(f"adapter {folder}: has no {SETTINGS} and {WEIGHTS}, so it is not an adapter")
    kind = read_json(folder / SETTINGS).get("peft_type")
    if kind != "LORA":
        raise UserError(f"adapter {folder}: is of type {str(kind)[:40]}; only LORA is supported")
    hub = read_json(folder / "config.json")
    if hub:
        trained = config_from_hub(hub, str(folder / "config.json"))
        if any(getattr(trained, key) != getattr(lm.config, key) for key in CONVERTED):
            convert(lm, trained.attention, trained.block_length)
    stated = lora_settings(folder, SETTINGS)
    check_weights(stated, folder, WEIGHTS)
    _inject(lm.network, require().LoraConfig(**stated), str(folder / SETTINGS))
    weights = {name.removeprefix(OUTER): w for name, w in load_file(folder / WEIGHTS).items()}
    try:
        found = require().set_peft_model_state_dict(lm.network, weights)
    except RuntimeError as error:  # a shape
        raise UserError(f"adapter {folder} does not fit {lm.name!r}: {str(error).splitlines()[-1].strip()}") from error
    odd = [*found.unexpected_keys, *(name for name in found.missing_keys if "lora_" in name)]
    if odd:
        raise UserError(f"adapter {folder} does not fit {lm.name!r}: {odd[0]!r} is in one of them only")
    lm.network.requires_grad_(False).eval()
    if merged:
        merge(lm.network)


@torch.no_grad()
def merge(network: Transformer) -> None:
    """Add the adapters to the weights they stand beside, in place; quantised matrices become full ones."""
    from peft.tuners.lora import LoraLayer

    layers, dtype = network.layers, network.embed.weight.dtype
    for name, module in list(layers.named_modules()):
        if isinstance(module, LoraLayer):
            layers.set_submodule(name, _full(module.get_base_layer(), dtype, module))
    for name, module in list(layers.named_modules()):
        if isinstance(module, nn.Linear) and is_quantised(module):
            layers.set_submodule(name, _full(module, dtype))
    del network.peft_config


def _full(linear: Any, dtype: torch.dtype, adapter: Any = None) -> nn.Linear:
    """A plain linear layer with these weights and what the adapter adds to them."""
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(linear).float()
    if adapter is not None:
        weight = weight + adapter.get_delta_weight("default").float()
    full = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    full.weight, full.bias = nn.Parameter(weight.to(dtype)), linear.bias
    return full
