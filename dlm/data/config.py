"""The [data] section of a TOML, and the config of `dlm-tokenizer`."""

from os import PathLike
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

Source = Literal["stdlib", "datasets", "text", "jsonl", "chat", "traces", "sudoku", "tokens"]


class DataConfig(BaseModel, frozen=True, extra="forbid"):
    """One source of training text and how its documents become sequences."""

    source: Source = Field(
        default="stdlib",
        description="Where documents come from: the running Python's standard library, Hugging Face datasets, local text, "
        "local JSONL, chat records, traces of decoding, generated Sudoku, or token shards written by `prepare`.",
    )
    paths: tuple[str, ...] = Field(
        default=(),
        description="A local file, glob or folder, or a list of them (text, jsonl, chat, tokens; data files of a datasets builder; traces: "
        "stores (.db), Parquet of `dlm-trace export`, JSON lines of trajectories).",
    )
    heldout_paths: tuple[str, ...] = Field(
        default=(), description="Held-out files; none: a hash of each document decides."
    )
    document: Literal["file", "paragraph", "line"] = Field(
        default="file", description="source = text: what one document is; paragraphs are separated by blank lines."
    )
    text_fields: tuple[str, ...] = Field(
        default=("text",), description="Columns (jsonl, datasets) that make the text of a row, joined by a newline."
    )

    dataset: str | None = Field(
        default=None, description="Hub id or folder, or json, text or parquet for the files in `paths`."
    )
    dataset_config: str | None = Field(default=None, description="Configuration (subset) of the dataset.")
    split: str = Field(default="train", description="Split of the dataset that training reads.")
    heldout_split: str | None = Field(default=None, description="Held-out split; none: a hash of each row decides.")
    streaming: bool = Field(default=False, description="Read the dataset as a stream, without a full download.")
    shuffle_buffer: int = Field(
        default=10_000, ge=1, description="Rows of a stream to shuffle among; 1 keeps the order."
    )

    messages_field: str | None = Field(
        default=None,
        description="source = chat: the column with a list of {role, content}; only assistant turns are answers.",
    )
    prompt_field: str | None = Field(
        default=None, description="source = chat: the column of prompts, with `response_field`."
    )
    response_field: str | None = Field(
        default=None, description="source = chat: the column of responses, with `prompt_field`."
    )
    answers: Literal["all", "last"] = Field(
        default="all", description="source = chat: which assistant turns are trained on; the others count as prompt."
    )

    trace_model: str | None = Field(
        default=None, description="source = traces: read only those of the model of this name."
    )

    include_tests: bool = Field(default=False, description="source = stdlib: also read its own tests.")
    stdlib_repeat: int = Field(default=1, ge=1, description="source = stdlib: repetitions of each file in an epoch.")
    site_packages: bool = Field(default=False, description="source = stdlib: train on installed packages, too.")
    site_packages_fraction: float = Field(
        default=1.0, gt=0, le=1, description="Share of installed packages' files to keep, by a hash of the path."
    )
    site_packages_max_bytes: int = Field(
        default=200_000, ge=1, description="Larger files of installed packages are skipped."
    )
    site_packages_path: str | None = Field(
        default=None, description="Folder of the installed packages; none: that of the running Python."
    )
    site_packages_fresh: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Least share of a package's file, in telling lines, that no file before has.",
    )
    site_packages_only: tuple[str, ...] = Field(default=(), description="Read only these top-level packages.")
    site_packages_skip: tuple[str, ...] = Field(default=(), description="Never read these top-level packages.")

    sudoku_pool: int = Field(default=2000, ge=1, description="source = sudoku: base puzzles that training scrambles.")
    sudoku_empty: tuple[int, int] = Field(default=(30, 55), description="source = sudoku: fewest and most empty cells.")

    pack: Literal["fixed", "row"] = Field(
        default="fixed",
        description="fixed: documents joined by end-of-text and cut into equal lengths; row: one document a sequence, "
        "truncated, or padded with end-of-text.",
    )
    heldout_fraction: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of documents held out of training by hash, but at least one; few text files are cut into pieces "
        "for that. 0: none.",
    )
    slips: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of training sequences with slips put in, tokens out of place and loops, without loss on them: a small "
        "model learns to go on after its own.",
    )
    cache: bool = Field(default=True, description="Keep tokenised documents in the cache folder (DLM_CACHE).")
    prefetch: int = Field(default=0, ge=0, description="Batches that a background thread prepares ahead; 0: none.")

    @field_validator("paths", "heldout_paths", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (str(value),) if isinstance(value, (str, PathLike)) else value

    @model_validator(mode="after")
    def _fits_together(self) -> "DataConfig":
        problem = _misplaced(self) or _missing(self)
        if problem:
            raise ValueError(problem)
        return self


READ_BY: dict[str, tuple[Source, ...]] = {
    "paths": ("text", "jsonl", "chat", "traces", "tokens", "datasets"),
    "heldout_paths": ("text", "jsonl", "chat", "traces", "datasets"),
    "document": ("text",),
    "text_fields": ("jsonl", "datasets"),
    **dict.fromkeys(("dataset", "dataset_config", "split", "heldout_split"), ("datasets", "chat")),
    **dict.fromkeys(("streaming", "shuffle_buffer"), ("datasets", "chat")),
    **dict.fromkeys(("messages_field", "prompt_field", "response_field", "answers"), ("chat",)),
    "trace_model": ("traces",),
    **{name: ("stdlib",) for name in DataConfig.model_fields if name.startswith(("include_tests", "stdlib", "site_"))},
    "slips": ("text", "jsonl", "chat", "stdlib", "tokens", "datasets"),
    **dict.fromkeys(("sudoku_pool", "sudoku_empty"), ("sudoku",)),
}
"""Field -> the sources that read it; setting it elsewhere is a mistake."""


def _misplaced(config: DataConfig) -> str | None:
    for name, sources in READ_BY.items():
        value = getattr(config, name)
        if value != DataConfig.model_fields[name].default and config.source not in sources:
            known = " or ".join(f'"{s}"' for s in sources)
            shown = f"{name} = {list(value) if isinstance(value, tuple) else value!r}"
            return f'{shown} is only read with source = {known}, but source = "{config.source}"'
    if config.dataset is None:
        for name in ("dataset_config", "heldout_split", "streaming"):
            if getattr(config, name):
                return f"{name} = {getattr(config, name)!r} needs `dataset`, which is not set"
    elif config.source == "chat" and config.paths and config.dataset not in ("json", "parquet"):
        return f'dataset = "{config.dataset}" and paths = {list(config.paths)} are both set: give one of them'
    return None


def _missing(config: DataConfig) -> str | None:
    if config.source in ("text", "jsonl", "traces", "tokens") and not config.paths:
        return f'source = "{config.source}" needs `paths` (a file, glob or folder, or a list of them)'
    if config.source == "datasets" and config.dataset is None:
        return 'source = "datasets" needs `dataset` (a hub id, a local folder, or json/text/parquet with `paths`)'
    if config.source == "chat":
        pair = (config.prompt_field, config.response_field)
        if config.dataset is None and not config.paths:
            return 'source = "chat" needs `paths` (JSONL files) or `dataset`'
        if (pair[0] is None) != (pair[1] is None):
            return f"prompt_field = {pair[0]!r} and response_field = {pair[1]!r} go together: set both or neither"
        if config.pack != "row":
            return f'source = "chat" needs pack = "row", not "{config.pack}": a cut through a conversation may hold no answer'
        if pair[0] is not None and config.messages_field is not None:
            return f"messages_field = {config.messages_field!r} and prompt_field = {pair[0]!r} are both set: take one"
    if config.source == "sudoku" and not 1 <= config.sudoku_empty[0] <= config.sudoku_empty[1] <= 81:
        return f"sudoku_empty = {list(config.sudoku_empty)} must be [fewest, most] with 1 <= fewest <= most <= 81"
    if config.source in ("jsonl", "datasets") and not config.text_fields:
        return "text_fields = [] names no column: give at least one"
    return None


class TokenizerConfig(BaseModel, frozen=True, extra="forbid"):
    """A byte-level BPE tokenizer to train: its size, what it reads and where it goes."""

    output: str = Field(
        default="tokenizer",
        description="Folder that receives tokenizer.json, vocab.json, merges.txt and their configs.",
    )
    data: DataConfig = Field(default=DataConfig(), description="Merges are learned from its training split.")
    vocab_size: int = Field(default=4096, ge=260, description="Tokens in all, with special ones and 256 bytes.")
    min_frequency: int = Field(default=2, ge=1, description="A pair seen less often is never merged.")
    mask_token: str = Field(default="[MASK]", min_length=1, description="The token diffusion starts from.")
    eos_token: str = Field(default="<|endoftext|>", min_length=1, description="End of text; also the padding.")
    chat_tokens: bool = Field(default=True, description="Add <|im_start|>, <|im_end|> and a chat template.")
    special_tokens: tuple[str, ...] = Field(default=(), description="Further tokens that are never split.")
    max_documents: int | None = Field(default=None, ge=1, description="Stop after so many; endless streams need it.")

    @model_validator(mode="after")
    def _fits_together(self) -> "TokenizerConfig":
        names = special_names(self)
        if len(set(names)) != len(names):
            raise ValueError(f"mask_token, eos_token and special_tokens name a token twice: {list(names)}")
        if self.vocab_size < 256 + len(names):
            what = f"256 bytes and {len(names)} special tokens"
            raise ValueError(f"vocab_size = {self.vocab_size} cannot hold {what}: raise it to {256 + len(names)}")
        if self.data.source in ("traces", "sudoku", "tokens"):
            raise ValueError(f'data.source = "{self.data.source}" holds no text to train a tokenizer on')
        return self


def special_names(config: TokenizerConfig) -> tuple[str, ...]:
    """The special tokens in the order of their ids: end-of-text is 0, the mask is 1."""
    chat = ("<|im_start|>", "<|im_end|>") if config.chat_tokens else ()
    return (config.eos_token, config.mask_token, *chat, *config.special_tokens)
