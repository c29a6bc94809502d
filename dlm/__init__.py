"""Diffusion language models: load, generate, infill, score, train.

Importing this costs no torch: every name and every room is fetched on first use.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:  # what the lazy names are, for type checkers and editors
    from dlm.errors import UserError
    from dlm.evaluation.score import score
    from dlm.inference.engine import Engine
    from dlm.inference.generation import generate, infill
    from dlm.inference.request import Generation
    from dlm.models.config import ModelConfig
    from dlm.models.draft_files import load_draft
    from dlm.models.finding import available
    from dlm.models.lm import LM
    from dlm.models.loading import load
    from dlm.models.saving import save
    from dlm.models.transformer import Transformer
    from dlm.trace.store import TraceStore
    from dlm.training.loop import train

__version__ = "0.2.0"

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submodules={
        "bench",
        "config",
        "data",
        "diffusion",
        "evaluation",
        "inference",
        "kernels",
        "models",
        "prepare",
        "replay",
        "sudoku",
        "trace",
        "training",
    },
    submod_attrs={
        "errors": ["UserError"],
        "evaluation.score": ["score"],
        "inference": ["Engine", "Generation", "generate", "infill"],
        "models": ["LM", "ModelConfig", "Transformer", "available", "load", "load_draft", "save"],
        "trace": ["TraceStore"],
        "training": ["train"],
    },
)

__all__ = [
    "load",
    "load_draft",
    "save",
    "available",
    "generate",
    "infill",
    "score",
    "train",
    "Engine",
    "Generation",
    "TraceStore",
    "LM",
    "Transformer",
    "ModelConfig",
    "UserError",
    "__version__",
]
