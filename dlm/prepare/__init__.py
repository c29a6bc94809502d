"""Preparing: what a trained model makes for the training of the next. Importing it imports nothing heavy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "config": ["ResponsesConfig", "TrajectoriesConfig"],
        "responses": ["respond"],
        "trajectories": ["prepare"],
    },
)
