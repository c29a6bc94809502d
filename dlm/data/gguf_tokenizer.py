"""The tokenizer that a GGUF file holds: byte-level BPE of the kinds that checkpoints here have, and Llama's SentencePiece.

Sources: `src/llama-vocab.cpp` of llama.cpp for what the keys mean; the tokenizer.json that the named models are published
with for how texts are cut, since llama.cpp's own expressions only imitate those.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dlm.data.gguf import Header
from dlm.errors import UserError

TOKENS = "tokenizer.ggml.tokens"
MOST_TOKENS = 2**24
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The values of `tokenizer.ggml.token_type`."""
BLOCK = "\u2581"
"""How SentencePiece spells a space."""
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True)
class Cut:
    """How a kind of byte-level BPE cuts a text into words before it merges bytes.

    Each of `patterns` cuts the pieces that the one before left. Without patterns GPT-2's own is used; with `digits`,
    digits are cut off one by one before.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    whole_words: bool = False
    """A word that is in the vocabulary becomes that token, whatever the merges would give."""
    nfc: bool = False
    """Texts are first normalised to Unicode's NFC."""
    starts: bool = False
    """Texts begin with the begin-of-text token, unless the file says otherwise."""


GPT2, SMOLLM = Cut(), Cut(digits=True)
LLAMA3 = Cut((rf"{SHORT}|{WORDS}|\p{{N}}{{1,3}}|{REST}",), whole_words=True, starts=True)
QWEN2 = Cut((rf"{SHORT}|{WORDS}|\p{{N}}|{REST}",), nfc=True)
TEKKEN = Cut(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}*{SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}+{SMALL}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    whole_words=True,
    starts=True,
)
BAILING = Cut(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
SEED = Cut((rf"{SHORT}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",))
DEEPSEEK_CODER = Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
CUTS: dict[str, Cut] = {
    "gpt-2": GPT2,
    "smollm": SMOLLM,
    "starcoder": SMOLLM,
    "refact": SMOLLM,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "qwen2": QWEN2,
    "megrez": QWEN2,
    "deepseek-r1-qwen": Cut(QWEN2.patterns),
    "tekken": TEKKEN,
    "seed-coder": SEED,
    "deepseek-coder": DEEPSEEK_CODER,
    "bailingmoe": BAILING,
    "bailingmoe2": BAILING,
    "llada-moe": BAILING,
}
"""`tokenizer.ggml.pre` -> how texts are cut."""
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>"),
    *("</s>", "<EOT>", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "[EOS]", "[EOT]"),
)
"""Control tokens that end an answer by their names, as llama.cpp has them: files name one or two of those alone."""
NAMES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "mask": "mask"}
"""Our names of special tokens -> how keys spell them."""


def read_tokenizer(header: Header) -> tuple[Backend, dict[str, Any]]:
    """The file's tokenizer, and what a tokenizer_config.json would say: special tokens and the chat template.

    UserError for kinds that are not known, by name, and for vocabularies that are damaged.
    """
    kind, source = header.text("tokenizer.ggml.model"), str(header.file)
    if kind not in KINDS:
        raise UserError(
            f"{source}: tokenizer.ggml.model = {kind!r:.60} is not supported; known: {', '.join(KINDS)}. Use the folder "
            "that the file was converted from"
        )
    tokens, types = header.list(TOKENS), header.list("tokenizer.ggml.token_type")
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise UserError(f"{source}: {TOKENS} should be a list of texts")
    if len(tokens) >= MOST_TOKENS:
        raise UserError(f"{source}: {TOKENS} has {len(tokens):,} entries; the limit is {MOST_TOKENS:,}")
    types = types or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"{source}: {TOKENS} has {len(tokens):,} entries, and token_type {len(types):,}")
    try:
        backend = KINDS[kind](header, tokens, types)
        backend.add_tokens(list(_added(tokens, types)))
    except UserError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise UserError(f"{source}: its tokenizer is damaged: {error}") from error
    named = {f"{ours}_token": _token(header, tokens, theirs) for ours, theirs in NAMES.items()}
    settings: dict[str, Any] = {key: token for key, token in named.items() if token is not None}
    _start(backend, header, settings, tokens)
    if (template := header.text("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    return backend, settings


def ends_of(header: Header) -> list[int]:
    """Ids of the tokens that end an answer, end-of-text first; empty where the file names none."""
    if not header.has_tokenizer:
        return []
    tokens, types = header.list(TOKENS), header.list("tokenizer.ggml.token_type")
    stated = [header.whole(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    controls = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL}
    found = [*(token for token in stated if token is not None), *(controls[name] for name in ENDS if name in controls)]
    return list(dict.fromkeys(found))


def _byte_level(header: Header, tokens: Sequence[str], types: Sequence[int]) -> Backend:
    """GPT-2's: every byte is a character, and pairs merge in the order of `tokenizer.ggml.merges`."""
    name = header.text("tokenizer.ggml.pre", "default")
    if name not in CUTS:
        raise UserError(
            f"{header.file}: tokenizer.ggml.pre = {name!r:.60} is not supported; known: {', '.join(CUTS)}. Use the folder "
            "that the file was converted from"
        )
    cut, merges = CUTS[name], [tuple(merge.split(" ")) for merge in header.list("tokenizer.ggml.merges")]
    if odd := next((merge for merge in merges if len(merge) != 2), None):
        raise UserError(f"{header.file}: tokenizer.ggml.merges has {' '.join(odd)[:60]!r}, which is no pair")
    vocabulary = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole_words))
    split = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    digits = [pre_tokenizers.Digits(individual_digits=True)] * cut.digits
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, *split, by_bytes])
    backend.decoder = decoders.ByteLevel()
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(header: Header, tokens: Sequence[str], types: Sequence[int]) -> Backend:
    """Llama's: the pair whose piece has the best score merges first, and characters without a piece are bytes."""
    scores = header.list("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise UserError(f"{header.file}: {TOKENS} has {len(tokens):,} entries, and scores {len(scores):,}")
    vocabulary = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    pieces = {tokens[i]: scores[i] for i, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED)}
    unknown = _token(header, tokens, "unknown") or next((tokens[i] for i, k in enumerate(types) if k == UNKNOWN), None)
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(pieces, vocabulary),
            byte_fallback=True,
            fuse_unk=True,
            **({} if unknown is None else {"unk_token": unknown}),
        )
    )
    spaced = header.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(BLOCK)] if spaced else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", BLOCK)])
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    parts = [decoders.Replace(BLOCK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(parts)
    return backend


KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""`tokenizer.ggml.model` -> what builds it."""


def _merges(scores: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, the best first: scores stand for the order in which they were learned."""
    found = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, vocabulary[piece], vocabulary[left], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _added(tokens: Sequence[str], types: Sequence[int]) -> Iterator[AddedToken]:
    """Tokens that texts are never cut within; control tokens are left out when ids are decoded."""
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token:
            yield AddedToken(token, normalized=False, special=kind != USER_DEFINED)


def _start(backend: Backend, header: Header, settings: dict[str, Any], tokens: Sequence[str]) -> None:
    """Begin-of-text for those who ask their tokenizer for it, as transformers does; `Tokenizer.encode` never does."""
    usual = header.text("tokenizer.ggml.model") == "llama" or CUTS[header.text("tokenizer.ggml.pre") or ""].starts
    first = settings.get("bos_token")
    settings["add_bos_token"] = bool(header.get("tokenizer.ggml.add_bos_token", usual)) and first is not None
    if settings["add_bos_token"]:
        known = [(first, tokens.index(first))]
        backend.post_processor = processors.TemplateProcessing(f"{first} $A", f"{first} $A {first} $B", known)


def _token(header: Header, tokens: Sequence[str], name: str) -> str | None:
    """The special token of this name."""
    key = f"tokenizer.ggml.{name}_token_id"
    index = header.whole(key)
    if index is not None and index >= len(tokens):
        raise UserError(f"{header.file}: {key} = {index} lies outside its vocabulary of {len(tokens):,} tokens")
    return None if index is None else tokens[index]
