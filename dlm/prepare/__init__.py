"""Data that a trained model makes for training another one. Importing this loads nothing heavy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "config": ["FillingsConfig", "ResponsesConfig", "TrajectoriesConfig"],
        "fillings": ["fill"],
        "responses": ["respond"],
        "trajectories": ["prepare"],
    },
)
