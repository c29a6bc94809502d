"""Which path computes: Triton, C or torch. PATHS is the one place that decides; engines and kernels ask it.

| path   | runs on                           | provides                                                            |
|--------|-----------------------------------|---------------------------------------------------------------------|
| triton | a GPU, or Triton's interpreter    | attention over pages, norms, gates, experts, confidence with and without draws |
| c      | a CPU, float32 or bfloat16        | attention over pages, all layers in one call, confidence with and without draws |
| torch  | everywhere                        | all of it, by torch's own operations                                |

c-widened, c-dots, c-tiles and c-int16 are "c" with one way of multiplying bfloat16. "c" takes the fastest that the CPU has
of the first three; c-int16, which rounds weights to 12 bits and inputs to 14 of 64 that share a scale, must be asked for.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from dlm.errors import UserError
from dlm.kernels.c import binding, products
from dlm.kernels.threads import threads_now

Kernels = Literal["auto", "triton", "c", "torch", "c-widened", "c-dots", "c-tiles", "c-int16"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's own switch: its kernels run in its interpreter, on CPU tensors."""


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def _no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if not _installed():
        return "Triton is not installed: pip install 'dlm[gpu]'"
    if device.type != "cuda" and not INTERPRETED:
        return f"Triton's kernels need a GPU, and the model is on {device} (TRITON_INTERPRET=1 interprets them, slowly)"
    return None


def _no_c(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        return f"the kernels in C compute in float32 and bfloat16 on a CPU, and the model is {kind} on {device}"
    return binding.unavailable()


def _no_c_by(unit: str) -> Callable[[torch.device, torch.dtype], str | None]:
    def missing(device: torch.device, dtype: torch.dtype) -> str | None:
        if dtype == torch.float32:
            return "it multiplies bfloat16, and the model is float32"
        if (why := _no_c(device, dtype)) is None and not products.multiplies(UNITS[unit]):
            return f"this processor has no {NEEDS[unit]}, or the compiler does not know it"
        return why

    return missing


UNITS = {"widened": "bf16-widened", "dots": "bf16-dots", "tiles": "bf16-tiles", "int16": "int16-dots"}
"""Ways of multiplying bfloat16, each with the kind of product in C."""
NEEDS = {"widened": "arithmetic", "dots": "avx512_bf16", "tiles": "amx_bf16", "int16": "avx512_vnni or avx_vnni"}
"""The processor's feature that each needs."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """One way to compute. What it does not provide, torch computes."""

    name: str
    missing: Callable[[torch.device, torch.dtype], str | None]
    """Why it cannot compute for a model on that device, in that dtype; None where it can."""
    modules: dict[str, str]
    """Kernel -> the module in this folder that has it."""
    paged: bool
    """The engine's attention is its kernels; else torch's attention on views of the pages."""
    fuses: bool
    """A network's norms, gates and experts are its kernels."""
    whole_layers: bool
    """A plain network's layers are one call."""
    confident: bool
    """`confidence` is one pass over the vocabulary at temperature 0."""
    draws: bool
    """`confidence` is one pass above temperature 0 too."""
    unit: str | None = None
    """How C multiplies bfloat16, where that is not left to it."""

    def takes(self, x: Tensor) -> bool:
        """Whether its kernels compute on this tensor. C reads floats in memory: no gradient, and of torch's own kind."""
        return self._reads(x) and self.missing(x.device, x.dtype) is None

    def goes_on(self, x: Tensor) -> bool:
        """The same for a path that was found to be there: what a step asks many times is looked up once."""
        return self._reads(x) and _there("c" if self.unit else self.name, x.device, x.dtype)

    def _reads(self, x: Tensor) -> bool:
        if not self.whole_layers:
            return True
        return x.dtype == torch.float32 and not torch.is_grad_enabled() and type(x) in (Tensor, torch.nn.Parameter)

    def kernel(self, name: str) -> Any:
        """The function of that name."""
        return getattr(import_module(f"dlm.kernels.{self.modules[name]}"), name)

    def launching(self, x: Tensor) -> AbstractContextManager[object]:
        """Triton launches on the current device: make it x's."""
        return torch.cuda.device_of(x) if self.name == "triton" else nullcontext()


NAMES = ("paged_attention", "rope_write", "rms_norm", "confidence")
FUSED = {"gated": "gate", "gated_product": "grouped", "route": "experts", "mixture": "experts"}
"""What only a path that fuses has, and the module of Triton's."""
IN_C: dict[str, Any] = {
    "modules": dict.fromkeys(NAMES, "c.native"), "paged": True, "fuses": False, "whole_layers": True, "confident": True,
    "draws": True,
}  # fmt: skip
PATHS = {
    path.name: path
    for path in (
        Path(
            name="triton", missing=_no_triton, modules=dict(zip(NAMES, ("attention", "rope", "norm", "pick"), strict=True)) | FUSED,
            paged=True, fuses=True, whole_layers=False, confident=True, draws=True,
        ),
        Path(name="c", missing=_no_c, **IN_C),
        Path(
            name="torch", missing=lambda device, dtype: None, modules=dict.fromkeys((*NAMES, *FUSED), "reference"),
            paged=False, fuses=False, whole_layers=False, confident=False, draws=False,
        ),
        *(Path(name=f"c-{unit}", missing=_no_c_by(unit), unit=unit, **IN_C) for unit in UNITS),
    )
}  # fmt: skip
"""In the order in which "auto" tries them; torch never fails."""
_named: ContextVar[Path | None] = ContextVar("named", default=None)


def find(kernels: str, device: torch.device, dtype: torch.dtype) -> Path:
    """The path of that name, or with "auto" the first that can compute there. UserError says why a named one cannot."""
    if kernels == "auto":
        return next(path for path in PATHS.values() if path.missing(device, dtype) is None)
    if kernels not in PATHS:
        raise UserError(f"kernels = {kernels!r} is not known: take one of auto, {', '.join(PATHS)}")
    if (why := PATHS[kernels].missing(device, dtype)) is not None:
        raise UserError(f'kernels = "{kernels}" cannot be used: {why}; "auto" takes the fastest that can')
    return PATHS[kernels]


@contextmanager
def computing_with(path: Path) -> Iterator[None]:
    """Until left, this thread's kernels are those of one path, on all tensors that it takes."""
    token = _named.set(path)
    try:
        yield
    finally:
        _named.reset(token)


def path_of(x: Tensor) -> Path:
    """The path that computes on x: the one of `computing_with`, elsewhere the first that takes it; torch takes all."""
    if (named := _named.get()) is not None:
        return named if named.goes_on(x) else PATHS["torch"]
    return next(path for path in PATHS.values() if path.takes(x))


@cache
def _there(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    return PATHS[name].missing(device, dtype) is None


def described(dtype: torch.dtype = torch.float32, threads: int | None = None, kernels: str = "auto") -> str:
    """What computes on the CPU, for reports: "2 threads, kernels in C". `threads` are those that torch will be given."""
    given = torch.get_num_threads() if threads is None else threads
    in_c = find(kernels, torch.device("cpu"), dtype).name == "c"
    used = min(given, threads_now()) if in_c else given
    number = f"{given} thread{'' if given == 1 else 's'}"
    if used != given:
        number = f"{used} of {given} threads, since other processes use the cores"
    return f"{number}, kernels in C" if in_c else number
