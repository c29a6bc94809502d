"""Writes tokenised samples as Parquet shards, which `source = "tokens"` reads."""

import json
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dlm.atomic import check_writable, replacing, write_text
from dlm.data.config import DataConfig
from dlm.data.samples import Sample
from dlm.data.shards import MANIFEST, PROGRESS, read_manifest
from dlm.data.source import build_stream
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class _Job:
    config: DataConfig
    tokenizer: Tokenizer
    length: int
    seed: int
    shard_samples: int
    max_samples: int | None

    def request(self) -> dict[str, Any]:
        """The job as the manifest describes it; `request`, a hash, tells whether unfinished shards belong to it."""
        described = {
            "format": FORMAT,
            "length": self.length,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "seed": self.seed,
            "shard_samples": self.shard_samples,
            "max_samples": self.max_samples,
            "data": self.config.model_dump(mode="json"),
        }
        return {
            **described,
            "request": blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=16).hexdigest(),
        }


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
    if config.slips:
        raise UserError(
            f"data.slips = {config.slips} is drawn anew as training reads: leave it out here, and set it there"
        )
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
    stream = build_stream(job.config, job.tokenizer, job.length, split, job.seed, epochs=1)
    request = job.request()["request"]
    progress = folder / split / PROGRESS
    progress.parent.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = []
    if progress.is_file():
        saved = json.loads(progress.read_text("utf-8"))
        if saved["request"] != request:
            raise UserError(f"{folder} has unfinished shards of another tokenizer, length or [data]: give an empty one")
        shards = saved["shards"]
        stream.load_state_dict(saved["state"])
    while True:
        count = job.shard_samples
        if job.max_samples is not None:
            count = min(count, job.max_samples - sum(s["samples"] for s in shards))
        samples = list(islice(stream, count))
        if not samples:
            return shards
        name = f"{split}/{len(shards):05d}.parquet"
        _write_shard(folder / name, samples, job.length)
        shards.append({"file": name, "samples": len(samples)})
        write_text(progress, json.dumps({"request": request, "shards": shards, "state": stream.state_dict()}))


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
