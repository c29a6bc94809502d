"""Learns the merges of a byte-level BPE, as a program of its own. Imports only `tokenizers`, so that it starts fast.

The trainer is one long call that Ctrl-C cannot interrupt; a separate process can be killed at any time.
"""

import json
import signal
import sys
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


def learn() -> str:
    """A trained tokenizer as JSON, from standard input: one JSON line of settings, then one JSON string a line."""
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(settings["pieces"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    names = settings["special_tokens"]
    trainer = trainers.BpeTrainer(
        vocab_size=settings["vocab_size"],
        min_frequency=settings["min_frequency"],
        special_tokens=[tokenizers.AddedToken(name, special=True, normalized=False) for name in names],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((json.loads(line) for line in sys.stdin.buffer), trainer)
    return backend.to_str()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.buffer.write(learn().encode())
