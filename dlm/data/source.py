"""Which source a config names, and the stream of samples it becomes."""

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from dlm.data import corpus, local
from dlm.data.config import DataConfig
from dlm.data.documents import Row, columns, encode_all, end_of_text, text_of
from dlm.data.table import TableStream, TokenTable, cached_table
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError

if TYPE_CHECKING:
    from dlm.data.loader import SampleStream

SPLITS = ("train", "heldout")
REMEDIES = {
    "train": "add data, or lower the length (train.length)",
    "heldout": "add data, raise data.heldout_fraction, name data.heldout_paths, or hold nothing out: "
    "data.heldout_fraction = 0 and eval.sequences = 0",
}
"""What to do about a split that holds less than one sequence."""


def build_stream(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    length: int,
    split: str = "train",
    seed: int = 0,
    epochs: int | None = None,
    shorten: bool = False,
) -> "SampleStream":
    """Samples of `length` tokens. Training goes round for ever and the held-out split once, unless `epochs` says otherwise.

    `shorten` makes one shorter sample of joined documents (`data.pack = "fixed"`) that are less than one sequence.
    """
    if split not in SPLITS:
        raise UserError(f"split = {split!r}: known splits are {', '.join(SPLITS)}")
    if length < 1:
        raise UserError(f"length = {length}: a sequence has at least one token")
    if epochs is None and split == "heldout":
        epochs = 1
    stream = _stream(config, tokenizer, length, split, seed, epochs, shorten)
    if split == "train" and config.slips:
        from dlm.data.slips import Slips

        assert tokenizer is not None
        return Slips(stream, config.slips, tokenizer.token_bytes.nonzero()[0], seed)
    return stream


def _stream(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    length: int,
    split: str,
    seed: int,
    epochs: int | None,
    shorten: bool,
) -> "SampleStream":
    if config.source == "sudoku":
        return _sudoku(config, length, split, seed)
    if tokenizer is None:
        raise UserError(f'data.source = "{config.source}" needs a tokenizer: name its folder, or train one')
    pack, rotate = "row", True
    if config.source == "tokens":
        from dlm.data.shards import open_shards

        table = open_shards(config, tokenizer, length, split)
    elif config.source == "traces":
        from dlm.data.traces import trace_table

        table = trace_table(config, tokenizer, split)
    elif config.dataset is not None and config.streaming:
        from dlm.data.streaming import DatasetStream

        return DatasetStream(config, tokenizer, length, split, seed, epochs)
    else:
        table, pack, rotate = build_table(config, tokenizer, split), config.pack, split == "train"
        if shorten and pack == "fixed" and 0 < len(table.ids) < length:
            length = len(table.ids)
    what, end = f"{split} split of data.source = {config.source!r}", end_of_text(tokenizer)
    return TableStream(table, length, pack, end, seed, epochs, rotate=rotate, what=what, remedy=REMEDIES[split])


def build_table(config: DataConfig, tokenizer: Tokenizer, split: str) -> TokenTable:
    """A split that can be held whole: tokenised once, then taken from the cache by its content."""
    content, rows = _content(config, split)
    key = {"content": content, "tokenizer": tokenizer.fingerprint, "end": end_of_text(tokenizer)}
    if config.source == "chat":
        key |= {"template": tokenizer.chat_template, "answers": config.answers}
    size = tokenizer.vocab_size
    return cached_table(key, lambda: TokenTable.of(encode_all(rows(), config, tokenizer), size), config.cache)


def rows_of(config: DataConfig, split: str) -> Iterator[Row]:
    """The rows of one split, in the source's own order."""
    if config.dataset is not None:
        from dlm.data.streaming import dataset_rows

        return dataset_rows(config, split)
    return LOCAL[config.source](config, split)


def training_texts(config: DataConfig) -> Iterator[str]:
    """The texts a tokenizer is trained on; of a conversation, its messages."""
    for row in rows_of(config, "train"):
        if config.source != "chat":
            yield text_of(row, config)
            continue
        for field in columns(config):
            value = row.value.get(field)
            yield from (value,) if isinstance(value, str) else (str(m.get("content", "")) for m in value or ())


def _stdlib_rows(config: DataConfig, split: str) -> Iterator[Row]:
    for file in corpus.split_files(config, split):
        yield Row({"text": file.text}, file.path, file.path)


LOCAL: dict[str, Callable[[DataConfig, str], Iterator[Row]]] = {
    "stdlib": _stdlib_rows,
    "text": local.text_rows,
    "jsonl": local.json_rows,
    "chat": local.json_rows,
}


def _content(config: DataConfig, split: str) -> tuple[str, Callable[[], Iterator[Row]]]:
    """A hash of the rows, and a function that reads them again: reading twice is cheaper than tokenising once."""
    if config.source == "stdlib":  # small: selecting its files takes longer than keeping them in memory
        held = list(_stdlib_rows(config, split))
        return _hash(iter(held), ("text",)), lambda: iter(held)
    return _hash(rows_of(config, split), columns(config)), lambda: rows_of(config, split)


def _hash(rows: Iterator[Row], fields: tuple[str, ...]) -> str:
    digest = blake2b(repr(fields).encode(), digest_size=16)
    for row in rows:
        read: dict[str, Any] = {f: row.value.get(f) for f in fields}
        digest.update(json.dumps(read, ensure_ascii=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _sudoku(config: DataConfig, length: int, split: str, seed: int) -> "SampleStream":
    from dlm.sudoku.stream import SudokuStream

    if length != SudokuStream.length:
        raise UserError(f'length = {length}: with data.source = "sudoku" a sequence has {SudokuStream.length} cells')
    stream = SudokuStream(split=split, seed=seed, pool_size=config.sudoku_pool, empty=config.sudoku_empty)
    return cast("SampleStream", stream)  # its samples are plain dicts with the same keys
