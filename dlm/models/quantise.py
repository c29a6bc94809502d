"""The layers' matrices in 4 or 8 bits, through bitsandbytes or torchao; q8 is this project's own, for a CPU."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from dlm.errors import UserError
from dlm.models import int8, weight_only
from dlm.models.config import ModelConfig
from dlm.models.device import bytes_of
from dlm.models.transformer import Transformer

Quantisation = Literal["nf4", "int8", "q8", "torchao-fp8", "torchao-int8", "torchao-int4"]
AFTER_MERGING = ("q8", *weight_only.CONFIGS)
"""Kinds that are made of weights to which adapters were added; beside those of bitsandbytes an adapter stays."""


def quantise(network: Transformer, kind: Quantisation, device: torch.device, double: bool = True) -> None:
    """Replace the layers' linear modules by quantised ones and move everything to `device`, a matrix at a time.

    Embeddings, head and norms stay as they are, but q8 rounds the head too. `double` quantises the scales of nf4 as well.
    Products are computed in the dtype that the weights had.
    """
    library = require(kind, device, network.config, network.embed.weight.dtype)
    if kind == "q8":
        int8.quantise(network)
        return
    if kind in weight_only.CONFIGS:
        weight_only.quantise(network.layers, kind, device)
        network.to(device)
        return
    for name, module in list(network.layers.named_modules()):
        if type(module) is nn.Linear:
            network.layers.set_submodule(name, QUANTISED[kind](library, module, double).to(device))
    network.to(device)


def _nf4(library: Any, linear: nn.Linear, double: bool) -> nn.Module:
    weight, options = linear.weight, {"quant_type": "nf4", "compress_statistics": double}
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    found = library.nn.Linear4bit(*sizes, compute_dtype=weight.dtype, device="meta", **options)
    found.weight = library.nn.Params4bit(weight.data, requires_grad=False, module=found, **options)
    found.bias = linear.bias
    # The kernel for CPUs with AVX512-BF16 repacks the weights at the first forward in eval mode: it wants rows in
    # multiples of 32, computes in bfloat16, and what is trained after that gets no gradient through the layer.
    found.support_avx512bf16_for_cpu = False
    return found


def _int8(library: Any, linear: nn.Linear, double: bool) -> nn.Module:
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    found = library.nn.Linear8bitLt(*sizes, has_fp16_weights=False, device="meta")
    found.weight = library.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    found.bias = linear.bias
    return found


BITS = {"nf4": 4, "int8": 8, "torchao-fp8": 8, "torchao-int8": 8, "torchao-int4": 4}
"""Of a weight, its share of a scale aside; q8 is not here, for it stays on a CPU."""


def least_bytes(network: Transformer, kind: str) -> int:
    """What the network takes, at least, once `quantise` has been there."""
    linears = [m.weight for m in network.layers.modules() if type(m) is nn.Linear]
    return bytes_of(network) - sum(w.numel() * (8 * w.element_size() - BITS[kind]) // 8 for w in linears)


QUANTISED: dict[str, Callable[[Any, nn.Linear, bool], nn.Module]] = {"nf4": _nf4, "int8": _int8}


def require(
    kind: Quantisation,
    device: torch.device,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """bitsandbytes or torchao, once it has multiplied by quantised matrices on this device; else an error with the way out.

    With `config` they have the shapes of that network's layers, otherwise one has 64 rows and columns. `dtype` is that of
    the weights. q8 needs no library.
    """
    if kind == "q8":
        if device.type != "cpu":
            raise UserError(f"quantize = 'q8' is for a CPU, and the model goes to {device}: take 'int8' or 'nf4' there")
        if config is not None and config.moe is not None:
            raise UserError("quantize = 'q8': experts are stacked, and q8 rounds single matrices only")
        return None
    name, extra = ("torchao", "quant") if kind in weight_only.CONFIGS else ("bitsandbytes", "qlora")
    if config is not None and config.moe is not None:
        raise UserError(f"quantize = {kind!r}: experts are stacked, and {name} quantises single matrices only")
    found = None
    for rows, columns in [(64, 64)] if config is None else shapes(config):
        try:
            found = _tried(kind, rows, columns, device, dtype)
        except ImportError as error:
            raise UserError(f"{kind} needs {name}: pip install 'dlm[{extra}]' ({error})") from error
        except (RuntimeError, NotImplementedError, AttributeError, AssertionError, ValueError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            what = "" if config is None else f" for a matrix of {rows} rows and {columns} columns, which this model has"
            raise UserError(
                f"this {name} cannot do {kind} on {device.type}{what} ({reason}); upgrade it, use a CUDA device, "
                "another kind, or leave the weights unquantised"
            ) from error
    return found


def _tried(kind: Quantisation, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The library, once a matrix of this shape was multiplied by. Raises what it raises."""
    plain = nn.Linear(columns, rows, bias=False, device="meta")
    with torch.no_grad():
        if kind in weight_only.CONFIGS:
            plain.weight = nn.Parameter(torch.ones(rows, columns, dtype=dtype))
            both = nn.Sequential(plain)
            weight_only.quantise(both, kind, device)
            both(torch.ones(2, columns, device=device, dtype=dtype))
            return weight_only.package()
        quiet()
        import bitsandbytes

        plain.weight = nn.Parameter(torch.ones(rows, columns))
        QUANTISED[kind](bitsandbytes, plain, True).to(device).eval()(torch.ones(2, columns, device=device))
        return bitsandbytes


def shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(rows, columns) of the matrices that are quantised in a network of this config, each once."""
    with torch.device("meta"):
        layers = Transformer(config.model_copy(update={"num_hidden_layers": 1})).layers
    found = [(m.out_features, m.in_features) for m in layers.modules() if type(m) is nn.Linear]
    return list(dict.fromkeys(found))


def quiet() -> None:
    """Silence what bitsandbytes logs of kernels it lacks and of casts: it concerns speed, and comes at each import and matrix."""
    for room in ("backends.cpu.ops", "autograd._functions"):
        logging.getLogger(f"bitsandbytes.{room}").setLevel(logging.ERROR)


def is_quantised(network: nn.Module) -> bool:
    """Whether any of its matrices is in 4 or 8 bits."""
    return any(weight_only.is_rounded(p) or not p.is_floating_point() for p in network.parameters())
