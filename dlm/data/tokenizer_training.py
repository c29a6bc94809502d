"""Learning a byte-level BPE from documents, and writing it as a folder. Knows nothing of models."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dlm.data import chat
from dlm.data.atomic import write_text
from dlm.data.config import TokenizerConfig, special_names
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError

# Pieces that merges may not cross, made for source code: line breaks with the indentation after them, digits one by one,
# words with at most one character before (a space, a dot, an underscore), runs of signs, spaces inside a line.
PIECES = r"[\r\n]+[ \t]*|\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+(?!\S)|\s"


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str] | None = None) -> Tokenizer:
    """Learn the merges from `texts` (default: config.data's training split), write config.output, and return it."""
    if texts is None:
        from dlm.data.source import training_texts

        texts = training_texts(config.data)
    backend = _learn(config, islice(texts, config.max_documents))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
        "eos_token": config.eos_token,
        "pad_token": config.eos_token,
        "mask_token": config.mask_token,
        **({"chat_template": chat.CHATML} if config.chat_tokens else {}),
    }
    tokenizer = Tokenizer(backend, settings)
    _write(tokenizer, Path(config.output))
    return tokenizer


def _learn(config: TokenizerConfig, texts: Iterable[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    specials = [tokenizers.AddedToken(name, special=True, normalized=False) for name in special_names(config)]
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    counted = _Counted(texts)
    backend.train_from_iterator(counted, trainer)
    if counted.seen == 0:
        raise UserError("no documents to train a tokenizer on: check data.source and data.paths")
    return backend


class _Counted:
    """Texts that remember how many they were."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.seen = texts, 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.seen += 1
            yield text


def _write(tokenizer: Tokenizer, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output = {folder} is a file: give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as temporary:
        for name in tokenizer.backend.model.save(temporary):  # vocab.json and merges.txt
            write_text(folder / Path(name).name, Path(name).read_text("utf-8"))
    tokenizer.save(folder)
