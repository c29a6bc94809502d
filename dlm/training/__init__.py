"""Training: objectives, optimisers, exactly resumable checkpoints, and the loop, on accelerate."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "config": ["TrainConfig"],
        "loop": ["TrainResult", "train"],
        "masking": ["MASKINGS"],
        "objective": ["Objective"],
        "optim": ["Muon"],
    },
)
