"""Training on accelerate: `loop` runs it, `trainable` says what can be trained, `masking` how text is corrupted."""

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
