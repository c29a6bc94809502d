"""What users measure with `dlm-bench`: decoding, load, training, tokenizers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"config": ["BenchConfig"]})
