"""The structs of kernels.h, for Python. What they point to must be kept by whoever makes them."""

import ctypes

_P, _I = ctypes.c_void_p, ctypes.c_int64


class Product(ctypes.Structure):
    """y = x w^T + bias."""

    _fields_ = [("w", _P), ("panels", _P), ("bias", _P), ("n", _I), ("k", _I), ("ld", _I), ("kind", _I), ("scales", _P)]


class Layer(ctypes.Structure):
    """One layer's weights; `qkv` is one product and two empty ones where the three lie side by side."""

    _fields_ = [
        *[(name, _P) for name in ("attn_norm", "q_norm", "k_norm", "mlp_norm")],
        *[("qkv", Product * 3), ("o", Product), ("gate", Product), ("up", Product), ("down", Product)],
    ]


class Network(ctypes.Structure):
    """What all layers share."""

    _fields_ = [
        *[(name, _I) for name in ("layers", "d", "h", "g", "e", "f", "r")],
        *[("eps", ctypes.c_float), ("threads", ctypes.c_int32), ("half", _I)],
    ]


class Run(ctypes.Structure):
    """What stays as long as the same spans are run."""

    _fields_ = [
        *[(name, _I) for name in ("n", "spans", "page_size", "table_width", "layer_stride")],
        *[(name, _P) for name in ("cos", "sin", "slots", "all_rows", "starts", "positions", "visible", "tables")],
        *[(name, _P) for name in ("block_lengths", "keys", "values", "room", "projected", "known")],
    ]


STRUCTS = (Product, Layer, Network, Run)


def check_sizes(library: ctypes.CDLL) -> None:
    """Raise RuntimeError where the library's structs are not of these sizes."""
    sizes = (_I * len(STRUCTS))()
    library.dlm_sizes(sizes)
    for struct, size in zip(STRUCTS, sizes, strict=True):
        if ctypes.sizeof(struct) != size:
            raise RuntimeError(
                f"{struct.__name__} takes {size} bytes in C and {ctypes.sizeof(struct)} in Python: declare it alike in "
                "dlm/kernels/c/kernels.h and structs.py; the kernels are rebuilt by themselves"
            )
