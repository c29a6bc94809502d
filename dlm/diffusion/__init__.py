"""The process: masking, loss, likelihood bound, decode rules and addressed random numbers. Pure functions of tensors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "bound": ["Estimate", "likelihood", "likelihood_bound"],
        "loss": ["token_entropies", "token_losses", "token_weights"],
        "noise": ["mask_tokens"],
        "rng": ["gumbel", "philox", "uniform"],
        "unmask": ["RULES"],
    },
)
