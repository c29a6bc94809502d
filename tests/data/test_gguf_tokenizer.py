"""Tokenizers of GGUF files against merges done by hand, the expressions of llama.cpp, and transformers' own classes."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dlm.data.tokenizer import load_tokenizer
from tests.models import gguf_files

SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_CPP = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST],
    "qwen2": [SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST],
    "deepseek-r1-qwen": [SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST],
    "tekken": [  # the original, which a comment there quotes: what it runs takes é for a capital too
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "seed-coder": [SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "llada-moe": [
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"
        r"|\s+(?!\S)|\s+"
    ],
}
"""`src/llama-vocab.cpp`: expressions that cut one after the other, each what the one before left whole."""
WHOLE = ("llama-bpe", "tekken")
"""Where a word that is a token is that token."""
TEXTS = [
    "def area(r):\n        return 3.14159 * r**2  # it's HERE, isn't it?\n\n\n",
    "I'LL we've HTMLParser camelCase 1234567 +-=/// \n\n  x  \t\ty\r\n",
    "Größe naïve 東京は 你好 ½ 12³ … 🙂 don't\n 7\n    8",
    " two  spaces\n \n trailing   ",
]
RUNS = ["a", "Bc", "LL", "'s", "'T", " ", "  ", "\n", "\t", "12", "345", ".", "//", "é", "你", "_", "x"]


def texts() -> list[str]:
    drawn = random.Random(0)
    return [*TEXTS, *("".join(drawn.choices(RUNS, k=drawn.randrange(1, 16))) for _ in range(120))]


def byte_characters() -> dict[int, str]:
    """The character that GPT-2's vocabulary spells each byte with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = iter(range(256, 512))
    return {byte: chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)}


@pytest.fixture(scope="module")
def learned() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of bytes that cross every boundary there is: the lines were words to whoever learned them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=sorted(byte_characters().values())
    )
    lines = [line for text in texts() for line in (text, text[: len(text) // 2], text[3:])]
    backend.train_from_iterator(lines * 2, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    unmerged = [word for word in ("Ġisn", "ĠHERE", "ĠcamelCase") if word not in tokens]
    assert unmerged  # tokens that no merge leads to: some kinds take whole words first
    tokens += unmerged
    return tokens, [tuple(merge) for merge in model["merges"]]


def file_of(folder: Path, **keys: Any) -> Path:
    """A GGUF file with a tokenizer alone."""
    writer = gguf_files.gguf.GGUFWriter(folder / "tokenizer.gguf", "llama")
    for key, value in keys.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        gguf_files.add(writer, name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "tokenizer.gguf"


def cut(text: str, patterns: list[str]) -> list[str]:
    """What each pattern matches and what lies between, as llama.cpp's `unicode_regex_split` has it."""
    pieces = [text]
    for pattern in patterns:
        found: list[str] = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                found += [piece[at : match.start()], match.group()]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


def merged(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """The first learned pair merges first, the leftmost of equal ones."""
    parts = list(word)
    while True:
        known = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_texts_are_cut_and_merged_as_the_kind_says(
    kind: str, learned: tuple[list[str], list[tuple[str, str]]], tmp_path: Path
) -> None:
    tokens, merges = learned
    ranks, ids = {merge: i for i, merge in enumerate(merges)}, {token: i for i, token in enumerate(tokens)}
    file = file_of(tmp_path, model="gpt2", pre=kind, tokens=tokens, merges=[" ".join(merge) for merge in merges])
    ours, spelt, differing = load_tokenizer(file), byte_characters(), 0
    for text in texts():
        expected: list[int] = []
        for piece in cut(text, LLAMA_CPP[kind]):
            word = "".join(spelt[byte] for byte in piece.encode())
            whole = kind in WHOLE and word in ids
            expected += [ids[word]] if whole else [ids[part] for part in merged(word, ranks)]
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == text
        differing += [ids[part] for part in merged("".join(spelt[byte] for byte in text.encode()), ranks)] != expected
    assert differing > 20  # uncut, these texts would be other tokens


def test_qwen2s_is_transformers_own(learned: tuple[list[str], list[tuple[str, str]]], tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    tokens, merges = learned
    tokens = [*tokens, "<|endoftext|>", "<|im_start|>", "<tool_call>"]
    file = file_of(
        tmp_path,
        model="gpt2",
        pre="qwen2",
        tokens=tokens,
        token_type=[1] * (len(tokens) - 3) + [3, 3, 4],
        merges=[" ".join(merge) for merge in merges],
        eos_token_id=len(tokens) - 3,
    )
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    theirs.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    ours = load_tokenizer(file)
    for text in [*texts(), "<|im_start|>user\nhi <tool_call>{}<|endoftext|>", "Ｎｅ\u0301e\u0301 \u1100\u1161"]:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


# --- SentencePiece ----------------------------------------------------------------------------------------------------

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    "▁",
    "e",
    "t",
    "a",
    "o",
    "g",
    "▁t",
    "h",
    "▁the",
    "he",
    "th",
    "in",
    "▁a",
    "n",
    "i",
    "s",
    "er",
    "▁is",
    "is",
    "re",
    "d",
    "▁in",
    "r",
    ".",
    ",",
    "▁▁",
    "▁▁▁▁",
    "l",
    "▁an",
    "and",
    "▁and",
    "w",
    "x",
    "y",
    "the",
    "ther",
    "ing",
]


def sentencepiece(folder: Path, **keys: Any) -> Path:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<tool>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [0.0]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    stated = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types}
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return file_of(folder, **{**stated, **special, **keys})


def by_hand(text: str, prefix: bool = True) -> list[int]:
    """Neighbours of the best score merge first, the leftmost of equal ones; what is no piece is bytes."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    scores = {piece: -i for i, piece in enumerate(PIECES)}
    parts = list(("▁" if prefix else "") + text.replace(" ", "▁"))
    while True:
        known = [(-scores[l + r], i) for i, (l, r) in enumerate(pairwise(parts)) if l + r in scores]
        if not known:
            break
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found: list[int] = []
    for part in parts:
        found += [tokens.index(part)] if part in scores else [3 + byte for byte in part.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_by_score(prefix: bool, tmp_path: Path) -> None:
    ours, drawn = load_tokenizer(sentencepiece(tmp_path, add_space_prefix=prefix)), random.Random(1)
    made = ["".join(drawn.choices("thein arsdo.,lwxyg  ", k=drawn.randrange(1, 24))) for _ in range(200)]
    for text in ["the other thing is in and", "naïve 東京\n\tx", "    four", *made]:
        assert ours.encode(text) == by_hand(text, prefix), text
        assert ours.decode(ours.encode(text)) == text
    assert ours.special_id("</s>") == 2
    assert ours.encode("</s>the<tool>")[0] == 2


def test_begin_of_text_is_for_those_who_ask(tmp_path: Path) -> None:
    ours = load_tokenizer(sentencepiece(tmp_path))
    assert ours.encode("the") == by_hand("the")
    ours.save(tmp_path / "out")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("the").input_ids == [1, *by_hand("the")]
    without = load_tokenizer(sentencepiece(tmp_path, add_bos_token=False))
    assert without.backend.post_processor is None


def test_special_tokens_and_template(tmp_path: Path) -> None:
    ours = load_tokenizer(
        sentencepiece(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}", mask_token_id=4)
    )
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert ours.eos_token_id == 2
    assert ours.mask_token == "<0x01>"
