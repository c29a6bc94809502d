"""Pieces of tokens against the `tokenizers` library, on a byte-level and a SentencePiece-like vocabulary."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dlm.trace.pieces import Pieces
from tests.refusals import refused

TEXT = "def naïve(x):\n    return “x” — 猫 🐈\n\tprint('ok')  # done\n" * 3


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["[MASK]"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def test_byte_level_pieces_are_what_the_library_decodes():
    tokenizer = byte_level()
    pieces = Pieces.of_tokenizer(tokenizer.to_str())
    ids = tokenizer.encode(TEXT).ids
    assert len(pieces) == tokenizer.get_vocab_size()
    assert pieces.text(ids) == TEXT
    assert b"".join(pieces[i] for i in ids) == TEXT.encode()
    assert pieces.text([0, *ids[:3]], mask_id=0).startswith("░def")
    assert pieces.text([0, 99_999, -2]) == "[MASK]�▒"


def test_sentencepiece_like_pieces():
    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    pieces = Pieces.of_tokenizer(tokenizer.to_str())
    assert pieces.text([1, 2, 3, 4, 5, 6]) == " the cats€"


def test_bytes_and_back():
    pieces = Pieces.of_tokenizer(byte_level().to_str())
    back = Pieces.from_bytes(pieces.to_bytes())
    assert [back[i] for i in range(len(back))] == [pieces[i] for i in range(len(pieces))]
    assert len(Pieces.from_bytes(Pieces.of([]).to_bytes())) == 0


@pytest.mark.parametrize("text", ["{}", '{"model": {"vocab": 3}}', "{"])
def test_what_is_no_tokenizer(text, tmp_path):
    refused("cannot be understood", Pieces.of_tokenizer, text)
    refused("no tokenizer.json", Pieces.of_tokenizer, tmp_path)
