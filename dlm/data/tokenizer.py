"""The tokenizer that all of dlm uses: text to ids and back, and the ids of mask and end-of-text."""

import json
import re
import reprlib
import threading
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from dlm.atomic import write_text
from dlm.data import chat
from dlm.data.gguf import is_gguf, read_header
from dlm.data.json_file import read_object
from dlm.errors import UserError

#: names of the mask in published checkpoints, for folders whose configs do not name it.
MASK_NAMES = ("[MASK]", "<|mdm_mask|>", "<|mask|>", "<|MASK|>", "|<MASK>|", "<mask>")
NAMES = ("mask_token", "eos_token", "pad_token", "bos_token", "unk_token")
#: glob patterns of files that hold a vocabulary.
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "merges.txt")
MOST_TOKENS = 2**24
#: tokenizer classes that checkpoints bring as code -> transformers' own class that reads the same files.
SAME_AS = {"DreamTokenizer": "qwen2"}  # Dream starts from Qwen2.5 and keeps its byte-level BPE
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
#: held while `backend.encode_special_tokens` must stay as it is: it is a switch of the backend, not an argument of `encode`.
SWITCH = threading.Lock()


class Tokenizer:
    """A `tokenizers.Tokenizer` with the names a checkpoint's folder gives its special tokens.

    `settings` is tokenizer_config.json merged over special_tokens_map.json; `folder`, where they lie, is for messages.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None = None, folder: Path | None = None
    ) -> None:
        self.backend, self.folder = backend, folder
        self.settings = dict(settings or {})
        # A stored rule for truncation would silently cut corpora.
        backend.no_truncation()
        backend.no_padding()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        largest = max(self.backend.get_vocab(with_added_tokens=True).values(), default=None)
        if largest is None:
            raise UserError("this tokenizer has no tokens: train one with dlm-tokenizer")
        if largest >= MOST_TOKENS:
            raise UserError(f"this tokenizer has a token of id {largest:,}; ids must lie below {MOST_TOKENS:,}")
        return largest + 1

    @cached_property
    def mask_token(self) -> str | None:
        return self._named("mask_token", MASK_NAMES)

    @cached_property
    def eos_token(self) -> str | None:
        return self._named("eos_token", EOS_NAMES)

    @cached_property
    def mask_token_id(self) -> int | None:
        """Id of the mask, or None where the folder names none."""
        return self._id(self.mask_token)

    @cached_property
    def eos_token_id(self) -> int | None:
        """Id of end-of-text, or None where the folder names none."""
        return self._id(self.eos_token)

    @cached_property
    def pad_token_id(self) -> int | None:
        """Id of the padding: end-of-text unless the folder names another."""
        named = self._id(self._named("pad_token", ()))
        return self.eos_token_id if named is None else named

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides the ids of a text."""
        return blake2b(self.backend.to_str().encode(), digest_size=16).hexdigest()

    @cached_property
    def token_bytes(self) -> NDArray[np.int32]:
        """UTF-8 bytes each id stands for, (vocab_size,); special tokens are 0."""
        sizes = np.zeros(self.vocab_size, np.int32)
        byte_level = "ByteLevel" in json.dumps(json.loads(self.backend.to_str())["decoder"])
        for token, index in self.backend.get_vocab(with_added_tokens=False).items():
            sizes[index] = len(token) if byte_level else _piece_bytes(token)
        for index, added in self.backend.get_added_tokens_decoder().items():
            sizes[index] = 0 if added.special else len(added.content.encode())
        return sizes

    @cached_property
    def begin(self) -> list[int]:
        """Ids that this tokenizer puts before a text that is to be continued, as transformers does; often none.

        From its post-processor (`add_bos_token = false` in the settings says no). A causal model's heads rest on the
        first token where they have nothing to say: one that has learned a token for that needs it.
        """
        if self.settings.get("add_bos_token") is False:
            return []
        plain = self.encode("a")
        whole = self.backend.encode("a").ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:at]

    def begun(self, ids: list[int]) -> list[int]:
        """The ids of a text that is to be continued or filled in, beginning as this tokenizer has texts begin."""
        return ids if ids[: len(self.begin)] == self.begin else [*self.begin, *ids]

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`; with `special`, names such as "[MASK]" inside it become their token. Adds no start or end.

        Any thread may call this and `encode_batch`; they take turns.
        """
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Ids of many texts. A corpus is read with special=False: a file that mentions "[MASK]" holds no mask."""
        try:
            with SWITCH:
                if self.backend.encode_special_tokens == special:
                    self.backend.encode_special_tokens = not special
                return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError:
            for text in texts:
                _require_unicode(text)
            raise

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 come out as U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as one string, by the folder's own template or a plain one."""
        source = "the chat template" if self.folder is None else f"the chat template in {self.folder}"
        return chat.render(self.chat_template, messages, add_generation_prompt, self.template_names, source)

    @cached_property
    def chat_template(self) -> str:
        """The folder's template; without one, ChatML if its tokens exist, else plain lines."""
        template = self.settings.get("chat_template")
        if isinstance(template, list) and all(isinstance(t, dict) for t in template):  # several, by name
            template = next((t.get("template") for t in template if t.get("name") == "default"), None)
        if template is not None and not isinstance(template, str):
            raise UserError(f"chat_template = {reprlib.repr(template)} should be a text, or a list of named ones")
        if template:
            return template
        return chat.CHATML if self._id("<|im_end|>") is not None else chat.PLAIN

    @property
    def template_names(self) -> dict[str, str]:
        """Special tokens by the names templates use."""
        names = {k: self._named(k, ()) for k in ("bos_token", "pad_token", "unk_token")}
        return {k: v or "" for k, v in {**names, "eos_token": self.eos_token, "mask_token": self.mask_token}.items()}

    def special_id(self, text: str) -> int | None:
        """The id of the special token of this name, or None; decoding leaves such tokens out."""
        index = self._id(text)
        added = None if index is None else self.backend.get_added_tokens_decoder().get(index)
        return index if added is not None and added.special else None

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads too."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        pad = None if self.pad_token_id is None else self.backend.id_to_token(self.pad_token_id)
        named = {"mask_token": self.mask_token, "eos_token": self.eos_token, "pad_token": pad}
        defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings = {**defaults, **{k: v for k, v in named.items() if v}, **self.settings}
        settings.pop("auto_map", None)  # names remote code this folder does not ship
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

    def with_mask(self) -> "Tokenizer":
        """A copy with the token "[MASK]" added behind the last one, so that no other id changes; itself if it has a
        mask."""
        if self.mask_token is not None:
            return self
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.add_special_tokens([MASK_NAMES[0]])
        return Tokenizer(backend, self.settings | {"mask_token": MASK_NAMES[0]})

    def _named(self, key: str, fallbacks: tuple[str, ...]) -> str | None:
        value = _text(self.settings.get(key))
        return next((name for name in (value, *fallbacks) if name and self._id(name) is not None), None)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{text[:20]!a}… is no Unicode text: character {error.start} is {text[error.start]!a}, half of a surrogate pair"
        ) from None


def _piece_bytes(token: str) -> int:
    """Bytes of a SentencePiece token, where a block stands for a space and <0x0A> for a byte."""
    return 1 if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else len(token.replace("\u2581", " ").encode())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, the folder it lies in, or a GGUF file. Other folders are read through
    transformers."""
    path = Path(path)
    if is_gguf(path):
        from dlm.data.gguf_tokenizer import read_tokenizer

        return Tokenizer(*read_tokenizer(read_header(path)), path)
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    if not path.exists():
        raise UserError(f"no tokenizer at {path}: give a folder with tokenizer.json, or train one with dlm-tokenizer")
    if not file.is_file():
        return _from_transformers(folder)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception
        raise UserError(f"{file} is not a tokenizer.json that `tokenizers` can read: {error}") from error
    return Tokenizer(backend, _settings(folder), folder)


def has_vocabulary(folder: Path) -> bool:
    """Whether a folder or a GGUF file holds a vocabulary; tokenizer_config.json alone is none."""
    if is_gguf(folder):
        return read_header(folder).has_tokenizer
    return any(any(folder.glob(pattern)) for pattern in VOCABULARIES)


def _settings(folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        read = {key: value for key, value in read_object(folder / name).items() if value is not None}
        for key, value in read.items():
            if key in NAMES and not isinstance(_text(value), str):
                raise UserError(f"{folder / name}: {key} = {reprlib.repr(value)} should be a token's text")
        merged.update(read)
    if (template := folder / "chat_template.jinja").is_file():
        merged["chat_template"] = chat.read_template(template)
    return merged


def _text(value: Any) -> Any:
    """A special token's text, which folders give as it is or as {"content": …, "lstrip": …}."""
    return value.get("content") if isinstance(value, dict) else value


def _from_transformers(folder: Path) -> Tokenizer:
    """Folders with vocab.json, a SentencePiece model and the like, through transformers' converters."""
    if not has_vocabulary(folder):
        raise UserError(
            f"{folder} holds no tokenizer.json: train one with dlm-tokenizer, or copy the checkpoint's own there"
        )
    own_code = f"the tokenizer in {folder} is code of its own, which is never run: convert it to tokenizer.json first"
    settings = _settings(folder)
    code, known = settings.get("auto_map"), SAME_AS.get(str(settings.get("tokenizer_class")))
    if isinstance(code, dict) and "AutoTokenizer" in code and known is None:
        raise UserError(f"{own_code} (auto_map in tokenizer_config.json)")
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(
            str(folder), tokenizer_type=known, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # Rust and protobuf have exceptions of their own, and a converter any other
        why = f"transformers cannot read the tokenizer in {folder}: {error or type(error).__name__}"
        raise UserError(own_code if "trust_remote_code" in str(error) else why) from error
    if (backend := getattr(slow, "backend_tokenizer", None)) is None:
        raise UserError(
            f"the tokenizer in {folder} has no fast form: convert it to tokenizer.json by transformers first"
        )
    return Tokenizer(backend, settings, folder)
