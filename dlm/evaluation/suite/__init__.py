"""Models × decodings × tasks: one resumable file of results, each with its error. `dlm-eval` is its command."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"config": ["EvalConfig"], "run": ["evaluate_all"], "trial": ["Trial"], "trials": ["TRIALS"]},
)
