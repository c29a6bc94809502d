"""Kernels: Triton on a GPU, C on a CPU, and beside each its plain-PyTorch twin, which defines it and runs everywhere else."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "dispatch": [
            "confidence",
            "gated",
            "gated_product",
            "mixture",
            "paged_attention",
            "rms_norm",
            "rope_write",
            "route",
        ],
        "picked": ["Picked"],
        "routing": ["Routing"],
        "spans": ["Spans"],
    },
)
