"""Learning a byte-level BPE from documents, and writing it as a folder."""

import json
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

import tokenizers
from tokenizers.processors import TemplateProcessing

from dlm.atomic import check_writable, write_text
from dlm.data import chat
from dlm.data.config import TokenizerConfig, special_names
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError

# Pieces that merges may not cross, made for source code: line breaks with the indentation after them, digits one by one,
# words with at most one character before (a space, a dot, an underscore), runs of signs, spaces inside a line.
PIECES = r"[\r\n]+[ \t]*|\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+(?!\S)|\s"

LEARN = (sys.executable, "-P", str(Path(__file__).with_name("bpe.py")))
"""The process that learns the merges."""


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str] | None = None) -> Tokenizer:
    """Learn the merges from `texts` (default: config.data's training split), write config.output, and return it."""
    folder = Path(config.output)
    check_writable(folder, "output =")
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
        **({"bos_token": config.eos_token} if config.begin else {}),
    }
    if config.begin:
        end, known = config.eos_token, [(config.eos_token, backend.token_to_id(config.eos_token))]
        backend.post_processor = TemplateProcessing(f"{end} $A", f"{end} $A $B", known)
    tokenizer = Tokenizer(backend, settings)
    try:
        _write(tokenizer, folder)
    except OSError as error:
        raise UserError(f"output = {folder}: cannot be written to ({error.strerror})") from error
    return tokenizer


def _learn(config: TokenizerConfig, texts: Iterable[str]) -> tokenizers.Tokenizer:
    """The trained tokenizer. An exception here, such as Ctrl-C, ends the learning process."""
    settings = {
        "pieces": PIECES,
        "vocab_size": config.vocab_size,
        "min_frequency": config.min_frequency,
        "special_tokens": special_names(config),
    }
    with TemporaryFile() as log, subprocess.Popen(LEARN, stdin=PIPE, stdout=PIPE, stderr=log) as process:
        assert process.stdin is not None
        try:
            seen = _feed(process.stdin, json.dumps(settings), texts)
            learned = process.communicate()[0]
        finally:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):  # what was not sent yet
                process.stdin.close()
        if seen == 0:
            raise UserError("no documents to train a tokenizer on: check data.source and data.paths")
        if process.returncode:
            log.seek(0)
            said = log.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            said = said or f"its process ended with status {process.returncode}"
            raise UserError(f"the tokenizer could not be trained: {said}")
    return tokenizers.Tokenizer.from_str(learned.decode())


def _feed(pipe: IO[bytes], settings: str, texts: Iterable[str]) -> int:
    """Send settings and texts, a line each; returns how many texts there were."""
    seen = 0
    with suppress(BrokenPipeError):  # the process has ended; its log says why
        pipe.write(settings.encode() + b"\n")
        for text in texts:
            seen += 1
            pipe.write(json.dumps(text).encode() + b"\n")
    return seen


def _write(tokenizer: Tokenizer, folder: Path) -> None:
    with TemporaryDirectory() as temporary:
        for name in tokenizer.backend.model.save(temporary):  # vocab.json and merges.txt
            write_text(folder / Path(name).name, Path(name).read_text("utf-8"))
    tokenizer.save(folder)
