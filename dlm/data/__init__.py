"""Data: corpora, tokenizers, packing, resumable streams. Importing it costs nothing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "config": ["DataConfig", "TokenizerConfig"],
        "loader": ["BatchLoader", "SampleStream"],
        "preparing": ["prepare"],
        "source": ["build_stream"],
        "tokenizer": ["Tokenizer", "load_tokenizer"],
        "tokenizer_training": ["train_tokenizer"],
    },
)
