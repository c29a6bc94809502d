"""The network: one Transformer, the families of checkpoints it can read, and how to load and save them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "attention": ["AttentionSpec"],
        "config": ["ModelConfig", "MoEConfig"],
        "converting": ["convert"],
        "draft": ["Draft"],
        "draft_files": ["load_draft"],
        "families": ["FAMILIES", "Family"],
        "finding": ["available"],
        "lm": ["LM"],
        "loading": ["load"],
        "saving": ["save"],
        "transformer": ["Transformer"],
    },
)
