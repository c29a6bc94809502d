"""The layers' matrices in 4 or 8 bits, through bitsandbytes. Knows nothing of adapters, files or training."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from dlm.errors import UserError
from dlm.models.transformer import Transformer

Quantisation = Literal["nf4", "int8"]


def quantise(network: Transformer, kind: Quantisation, device: torch.device, double: bool = True) -> None:
    """Replace the layers' linear modules by quantised ones and move everything to `device`, a matrix at a time.

    Embeddings, head and norms stay as they are. `double` quantises the scales of nf4 as well. Products are computed in
    the dtype that the weights had.
    """
    library = require(kind, device)
    if network.config.moe is not None:
        raise UserError(f"quantize = {kind!r}: experts are stacked, and bitsandbytes quantises single matrices only")
    for name, module in list(network.layers.named_modules()):
        if type(module) is nn.Linear:
            network.layers.set_submodule(name, QUANTISED[kind](library, module, double).to(device))
    network.to(device)


def _nf4(library: Any, linear: nn.Linear, double: bool) -> nn.Module:
    weight, options = linear.weight, {"quant_type": "nf4", "compress_statistics": double}
    found = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        compute_dtype=weight.dtype,
        device="meta",
        **options,
    )
    found.weight = library.nn.Params4bit(weight.data, requires_grad=False, module=found, **options)
    found.bias = linear.bias
    return found


def _int8(library: Any, linear: nn.Linear, double: bool) -> nn.Module:
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(
        logging.ERROR
    )  # it says at each matrix that it casts
    found = library.nn.Linear8bitLt(
        linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False, device="meta"
    )
    found.weight = library.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    found.bias = linear.bias
    return found


QUANTISED: dict[str, Callable[[Any, nn.Linear, bool], nn.Module]] = {"nf4": _nf4, "int8": _int8}


def require(kind: str, device: torch.device) -> Any:
    """bitsandbytes, once it has multiplied by a small quantised matrix on this device; else an error with the way out."""
    try:
        import bitsandbytes

        small = nn.Linear(64, 64)
        QUANTISED[kind](bitsandbytes, small, True).to(device)(torch.zeros(1, 64, device=device))
    except ImportError as error:
        raise UserError(f"{kind} needs bitsandbytes: pip install 'dlm[qlora]' ({error})") from error
    except (RuntimeError, NotImplementedError, AttributeError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"this bitsandbytes cannot do {kind} on {device.type} ({reason}); upgrade it, use a CUDA device, "
            "or leave the weights unquantised"
        ) from error
    return bitsandbytes


def is_quantised(network: nn.Module) -> bool:
    """Whether any of its matrices is in 4 or 8 bits."""
    return any(not p.is_floating_point() for p in network.parameters())
