"""The library of the kernels in C for a CPU: compiled when it is first needed, kept for the next time.

DLM_NATIVE=0 switches them off; DLM_NATIVE=1 makes it an error that they cannot be had.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm.errors import UserError
from dlm.kernels.c.built import LOG, load
from dlm.kernels.c.compiler import BuildError, NoCompiler, Unfinished, compiler
from dlm.kernels.c.structs import check_sizes
from dlm.kernels.threads import threads_now

SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".c", ".h"))
FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"],
    "AVX2": ["-mavx2", "-mfma"],
}
"""By what torch itself uses of the CPU; nothing for others."""
_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "dlm_sizes": [_P],
    "dlm_rms_norm": [_P, _I, _I, _P, _P, _F, _P, _P, _I, _I, _I, _N],
    "dlm_rotate": [_P, _I, _P, _P, _P, _I, _I, _I, _I, _N],
    "dlm_write": [_P, _I, _P, _I, _P, _P, _P, _P, _P, _I, _I, _I, _I, _N],
    "dlm_paged_attention": [_P, _I, _P, _P, _N, *[_P] * 4, _I, *[_P] * 4, *[_I] * 6, _F, _N],
    "dlm_panel": [],
    "dlm_multiplies": [_I],
    "dlm_half_dots_pay": [],
    "dlm_room": [_I, _N],
    "dlm_attention_room": [_I, _I, _N],
    "dlm_layers_room": [_P, _I, _I],
    "dlm_panels": [_P, _I, _I, _I, _P, _N],
    "dlm_linear": [_P, _P, _I, _P, _I, _P, _N],
    "dlm_gated": [_P, _P, _P, _I, _P, _I, _P, _P, _N],
    "dlm_layers": [_P, _P, _P, _P, _P, _I, _P, _P, _I, _P, _P, _I, _P],
    "dlm_norm": [_P, _P, _F, _P, _P, _I, _I, _N],
    "dlm_norm_back": [*[_P] * 6, _I, _I, _N],
    "dlm_gate": [*[_P] * 3, _I, _N],
    "dlm_gate_back": [*[_P] * 5, _I, _N],
    "dlm_half_available": [],
    "dlm_half_room": [_N],
    "dlm_largest": [_P, _I, _I, _I],
    "dlm_half_product": [_P, _I, _I, _P, _I, _I, _P, _I, _I, _I, _F, _F, _P, _N],
    "dlm_confidence": [_P, _I, _I, _N, _F, *[_P] * 12, _I, _I, _N],
}
RESULTS: dict[str, type] = dict.fromkeys(
    ("dlm_panel", "dlm_room", "dlm_attention_room", "dlm_layers_room", "dlm_layers", "dlm_half_room", "dlm_confidence"),
    _I,
) | {"dlm_half_available": _N, "dlm_multiplies": _N, "dlm_half_dots_pay": _N, "dlm_largest": _F}
OPENMP = ", OpenMP"


def unavailable() -> str | None:
    """Why the kernels cannot be used now; None where they can. UserError if DLM_NATIVE=1 and they could not be built."""
    switch = os.environ.get("DLM_NATIVE")
    if switch == "0":
        return "DLM_NATIVE = 0 switches the kernels in C off"
    found, how = library()
    if found is None:
        if switch == "1":
            raise UserError(f"DLM_NATIVE = 1 demands the kernels in C, and they cannot be had: {how}")
        return how
    if OPENMP not in how and torch.get_num_threads() > 1:
        return f"built without OpenMP they serve one thread, and torch uses {torch.get_num_threads()}"
    return None


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernels, and how they were compiled; or None, and why not: what a user can mend is also logged, once."""
    if os.name != "posix":
        return None, f"they are not built on {os.name}"
    capability = torch.backends.cpu.get_cpu_capability()
    common = ["-std=gnu11", "-O3", "-fPIC", "-shared", *FLAGS.get(capability, [])]
    demanded = os.environ.get("DLM_NATIVE") == "1"
    try:
        command = compiler()
        try:
            found, openmp = load("native", SOURCES, command, [*common, "-fopenmp"], SIGNATURES), OPENMP
        except Unfinished:
            raise
        except BuildError:  # Apple's clang has no OpenMP
            found, openmp = load("native", SOURCES, command, common, SIGNATURES), ", one thread"
    except BuildError as error:
        if not (demanded or isinstance(error, NoCompiler)):  # an error already, and no surprise
            LOG.warning("the kernels in C are not used: %s; torch's own do their work, slower", error)
        return None, str(error)
    declare(found)
    return found, f"{' '.join(command)}, {capability}{openmp}"


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes what the functions take, and check that the structs are alike."""
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes, getattr(library, name).restype = types, RESULTS.get(name)
    check_sizes(library)


def loaded() -> ctypes.CDLL:
    """The compiled kernels, which are there: see `unavailable`."""
    found = library()[0]
    assert found is not None, "ask unavailable() first"
    return found


def call(name: str, *arguments: Tensor | float | None, threads: int | None = None) -> Any:
    """Tensors go by their address."""
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    return getattr(loaded(), name)(*given, threads_now() if threads is None else threads)
