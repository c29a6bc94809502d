"""Reads prepared shards: tokenised samples in Parquet, with a manifest that describes them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dlm.data.config import DataConfig
from dlm.data.documents import Document
from dlm.data.table import TokenTable, cached_table
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError

MANIFEST = "manifest.json"
PROGRESS = "progress.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder."""
    file = folder / MANIFEST
    if not file.is_file():
        begun = any(folder.glob(f"*/{PROGRESS}"))
        advice = "preparing it was not finished; run it again" if begun else "write it with `prepare`"
        raise UserError(f"data.paths: {folder} holds no {MANIFEST}: {advice}")
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error


def open_shards(config: DataConfig, tokenizer: Tokenizer, length: int, split: str) -> TokenTable:
    """One split of prepared shards as a table whose documents are its samples."""
    if len(config.paths) != 1:
        raise UserError(f'data.paths = {list(config.paths)}: source = "tokens" reads one folder')
    folder = Path(config.paths[0]).expanduser()
    manifest = read_manifest(folder)
    for name, have in (("length", length), ("tokenizer", tokenizer.fingerprint)):
        if manifest[name] != have:
            raise UserError(f"{folder} was prepared with {name} {manifest[name]}, not {have}: prepare it again")
    if split not in manifest["splits"]:
        raise UserError(f"{folder} holds no {split} split, only {', '.join(manifest['splits'])}")
    shards = manifest["splits"][split]
    key = {"shards": manifest["request"], "split": split, "files": shards}
    return cached_table(key, lambda: TokenTable.of(_documents(folder, shards), manifest["vocab_size"]), config.cache)


def _documents(folder: Path, shards: list[dict[str, Any]]) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for shard in shards:
        path = folder / shard["file"]
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path} cannot be read: {error}; prepare the folder again") from error
        if table.num_rows != shard["samples"]:
            raise UserError(
                f"{path} has {table.num_rows} samples, its manifest says {shard['samples']}: prepare it again"
            )
        ids = _matrix(table, "input_ids").astype(np.int32)
        masks = _matrix(table, "prompt_mask").astype(np.bool_) if "prompt_mask" in table.column_names else None
        for row in range(len(ids)):
            yield Document(ids[row], None if masks is None else masks[row])


def _matrix(table: Any, name: str) -> np.ndarray:
    """A column of equal lists as (rows, length)."""
    values = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values.reshape(table.num_rows, -1)
