"""Tokenised samples in Parquet shards: written once, read offline. Knows nothing of the text they came from."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dlm.atomic import check_writable, replacing, write_text
from dlm.data.config import DataConfig
from dlm.data.documents import Document
from dlm.data.packing import Sample
from dlm.data.table import TokenTable, cached_table
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
FORMAT = 1


@dataclass(frozen=True)
class _Job:
    """What was asked of `prepare`."""

    config: DataConfig
    tokenizer: Tokenizer
    length: int
    seed: int
    shard_samples: int
    max_samples: int | None

    def request(self) -> dict[str, Any]:
        """The job as the manifest tells it; `request` is its hash, by which half-done work is recognised."""
        asked = {
            "format": FORMAT,
            "length": self.length,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "seed": self.seed,
            "shard_samples": self.shard_samples,
            "max_samples": self.max_samples,
            "data": self.config.model_dump(mode="json"),
        }
        return {**asked, "request": blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=16).hexdigest()}


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    out_folder: str | Path,
    length: int,
    seed: int = 0,
    shard_samples: int = 8192,
    max_samples: int | None = None,
) -> dict[str, Any]:
    """Write every sample of one pass over both splits as Parquet, and return the manifest.

    Shards and manifest appear whole; called again, it goes on after the last whole shard, or does nothing.
    """
    if config.source in ("traces", "tokens", "sudoku"):
        raise UserError(f'data.source = "{config.source}": there is no text to tokenise')
    folder = Path(out_folder)
    job = _Job(config, tokenizer, length, seed, shard_samples, max_samples)
    request = job.request()
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        if manifest["request"] != request["request"]:
            raise UserError(f"{folder} holds shards of another tokenizer, length or [data]: give an empty folder")
        return manifest
    check_writable(folder, "--prepare")
    has_heldout = config.heldout_fraction > 0 or config.heldout_paths or config.heldout_split
    splits = ("train", "heldout") if has_heldout else ("train",)
    manifest = {**request, "splits": {split: _write_split(job, folder, split) for split in splits}}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    for split in splits:
        (folder / split / PROGRESS).unlink(missing_ok=True)
    return manifest


def _write_split(job: _Job, folder: Path, split: str) -> list[dict[str, Any]]:
    from dlm.data.source import build_stream

    stream = build_stream(job.config, job.tokenizer, job.length, split, job.seed, epochs=1)
    asked = job.request()["request"]
    progress = folder / split / PROGRESS
    progress.parent.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = []
    if progress.is_file():
        saved = json.loads(progress.read_text("utf-8"))
        if saved["request"] != asked:
            raise UserError(
                f"{folder} holds half-written shards of another tokenizer, length or [data]: give an empty folder"
            )
        shards = saved["shards"]
        stream.load_state_dict(saved["state"])
    while True:
        wanted = job.shard_samples
        if job.max_samples is not None:
            wanted = min(wanted, job.max_samples - sum(s["samples"] for s in shards))
        samples = list(islice(stream, wanted))
        if not samples:
            return shards
        name = f"{split}/{len(shards):05d}.parquet"
        _write_shard(folder / name, samples, job.length)
        shards.append({"file": name, "samples": len(samples)})
        write_text(progress, json.dumps({"request": asked, "shards": shards, "state": stream.state_dict()}))


def _write_shard(path: Path, samples: list[Sample], length: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(values: np.ndarray, kind: pa.DataType) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), kind), length)

    arrays = {"input_ids": column(np.stack([s["input_ids"] for s in samples]), pa.int32())}
    if any("prompt_mask" in s for s in samples):
        masks = np.stack([s.get("prompt_mask", np.zeros(length, np.bool_)) for s in samples])
        arrays["prompt_mask"] = column(masks, pa.bool_())
    with replacing(path) as temporary:
        pq.write_table(pa.table(arrays), temporary)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder."""
    file = folder / MANIFEST
    if not file.is_file():
        half = (
            "preparing it was not finished; run it again"
            if any(folder.glob(f"*/{PROGRESS}"))
            else "write it with `prepare`"
        )
        raise UserError(f"data.paths: {folder} holds no {MANIFEST}: {half}")
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
            raise UserError(
                f"{folder} was prepared with {name} {manifest[name]}, but this run has {have}: prepare it again"
            )
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
                f"{path} holds {table.num_rows} samples, the manifest says {shard['samples']}: prepare it again"
            )
        ids = _matrix(table, "input_ids").astype(np.int32)
        masks = _matrix(table, "prompt_mask").astype(np.bool_) if "prompt_mask" in table.column_names else None
        for row in range(len(ids)):
            yield Document(ids[row], None if masks is None else masks[row])


def _matrix(table: Any, name: str) -> np.ndarray:
    """A column of equal lists as (rows, length)."""
    values = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values.reshape(table.num_rows, -1)
