"""Hugging Face `datasets`: rows of a hub or local dataset, and a stream of them that resumes exactly."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from dlm.data.config import DataConfig
from dlm.data.documents import Row, columns, encode_rows, end_of_text
from dlm.data.local import find_files, split_paths
from dlm.data.samples import PACKERS, Sample, sample_of
from dlm.data.split import Split
from dlm.data.table import mix
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError

BUILDERS = {"json": ("*.jsonl", "*.json"), "text": ("*.txt",), "parquet": ("*.parquet",)}


def open_dataset(config: DataConfig, split: str, streaming: bool) -> Any:
    """The `datasets` object of a split, from the hub, its offline cache or a folder. UserError for what is not
    there."""
    import datasets

    assert config.dataset is not None
    name = config.heldout_split if split == "heldout" and config.heldout_split else config.split
    if config.dataset.startswith((".", "/", "~")) and not Path(config.dataset).is_dir():
        raise UserError(f'data.dataset = "{config.dataset}": no such folder (looked from {Path.cwd()})')
    subset = f", config {config.dataset_config}" if config.dataset_config else ""
    with _explained(f'data.dataset = "{config.dataset}" (split {name}{subset})'):
        if (Path(config.dataset) / "state.json").is_file() or (Path(config.dataset) / "dataset_dict.json").is_file():
            return _from_disk(config.dataset, name, streaming)
        files = _data_files(config, split)
        if files is not None:  # files given by hand are one split, which the builders call train
            return datasets.load_dataset(config.dataset, data_files=files, split="train", streaming=streaming)
        return datasets.load_dataset(config.dataset, config.dataset_config, split=name, streaming=streaming)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns the errors of `datasets` for missing, broken or unreachable data into UserErrors."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UserError:
        raise
    except ConnectionError as error:
        raise UserError(
            f"{what} is out of reach and not in the local cache: {error}. Go online once, or give local files in data.paths"
        ) from error
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(f"{what} cannot be read: {error}") from error


def _data_files(config: DataConfig, split: str) -> list[str] | None:
    paths, field = split_paths(config, split)
    if not paths:
        return None
    if config.dataset not in BUILDERS:
        raise UserError(f"data.{field} = {list(paths)} needs data.dataset json, text or parquet, not {config.dataset}")
    return [str(p) for p in find_files(paths, BUILDERS[config.dataset], field)]


def _from_disk(folder: str, name: str, streaming: bool) -> Any:
    import datasets

    loaded = datasets.load_from_disk(folder)
    if isinstance(loaded, datasets.DatasetDict):
        if name not in loaded:
            raise ValueError(f"it has the splits {', '.join(map(str, loaded))}")
        loaded = loaded[name]
    return loaded.to_iterable_dataset() if streaming else loaded


def dataset_rows(config: DataConfig, split: str) -> Iterator[Row]:
    """All rows of a split, once, in the dataset's order."""
    side = _split(config, split)
    return (row for row in _rows(config, split) if side.takes(row.key, row.key, split))


def _rows(config: DataConfig, split: str) -> Iterator[Row]:
    """All rows, of both splits."""
    rows = enumerate(open_dataset(config, split, config.streaming))
    while True:
        with _explained(str(config.dataset)):
            number, value = next(rows, (-1, None))
        if value is None:
            return
        yield _row(value, config, number)


def _split(config: DataConfig, split: str) -> Split:
    """Which rows are held out; the first `shuffle_buffer` rows of a streamed dataset tell whether it is small."""
    most = config.shuffle_buffer if config.streaming else None
    return Split.of(config, ((row.key, row.key) for row in _rows(config, split)), most)


def _row(value: Mapping[str, Any], config: DataConfig, number: int) -> Row:
    where = f"{config.dataset}, row {number}"
    for field in columns(config):
        if field not in value:
            raise UserError(f"{where}: no column `{field}`; the dataset has {', '.join(map(str, value))}")
    kept = {field: value[field] for field in columns(config)}
    return Row(kept, json.dumps(kept, sort_keys=True, default=str), where)


class ShuffleBuffer:
    """Rows in random order through a buffer: each draw takes one out, and the next row replaces it.

    Which slot is drawn is addressed by (seed, number of the draw), so rows and counters are the whole state;
    `datasets` has such a buffer too, but loses its rows on resuming. `keep(row, number)` is what the buffer, and so a
    checkpoint, holds of a row.
    """

    def __init__(
        self,
        dataset: Any,
        size: int,
        seed: int,
        what: str = "dataset",
        keep: Callable[[Any, int], Any] = lambda r, _: r,
    ) -> None:
        self.dataset, self.size, self.seed, self.what, self.keep = dataset, size, seed, what, keep
        self.rows: list[tuple[int, Mapping[str, Any]]] = []
        self.read = self.drawn = self.epoch = 0
        self._fresh = dataset.state_dict()
        self._finished = False
        self._begin(None)

    def next(self) -> tuple[int, Mapping[str, Any]] | None:
        """A row with its number; None at the end of an epoch, after which the next one begins."""
        while len(self.rows) < self.size and (row := self._pull()) is not None:
            self.rows.append(row)
        if not self.rows:
            self.read, self.epoch, self._finished = 0, self.epoch + 1, False
            self._begin(None)
            return None
        slot = int(mix(np.array([self.drawn], np.uint64), self.seed)[0] % np.uint64(len(self.rows)))
        self.drawn += 1
        # The last row takes the drawn one's place; the buffer is filled again before the next draw.
        self.rows[slot], self.rows[-1] = self.rows[-1], self.rows[slot]
        return self.rows.pop()

    def _pull(self) -> tuple[int, Mapping[str, Any]] | None:
        if self._finished:
            return None
        with _explained(self.what):
            value = next(self._upstream, None)
        if value is None:
            self._finished = True
            return None
        self.read, self._pulled = self.read + 1, True
        return self.read - 1, self.keep(value, self.read - 1)

    def _begin(self, upstream: dict[str, Any] | None) -> None:
        """Point the dataset at the start of the epoch, or at a saved place in it."""
        # datasets orders the shards by its epoch number, so the seed has a part in it; 0 keeps their order.
        number = 0 if self.size == 1 else 1 + self.epoch + 1024 * (self.seed % 2**20)
        self.dataset.set_epoch(number)
        self.dataset.load_state_dict(deepcopy(upstream or {**self._fresh, "epoch": number}))
        self._upstream = iter(self.dataset)
        self._place, self._pulled = upstream, False

    def state_dict(self) -> dict[str, Any]:
        counters = {"read": self.read, "drawn": self.drawn, "epoch": self.epoch, "finished": self._finished}
        # Until a row is read, datasets still reports where it was before it was moved.
        upstream = self.dataset.state_dict() if self._pulled else self._place
        return {**counters, "upstream": upstream, "rows": list(self.rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read, self.drawn, self.epoch = state["read"], state["drawn"], state["epoch"]
        self.rows = [(int(number), value) for number, value in state["rows"]]
        self._finished = state["finished"]
        self._begin(state["upstream"])


class DatasetStream(Iterator[Sample]):
    """Samples of a streamed dataset: split by hash, shuffled, tokenised and packed as they come."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, length: int, split: str, seed: int, epochs: int | None
    ) -> None:
        self.config, self.tokenizer, self.split, self.epochs = config, tokenizer, split, epochs
        dataset = open_dataset(config, split, streaming=True)
        # The columns that are read, and no others: an image or a date has no place in a checkpoint.
        name, size = str(config.dataset), config.shuffle_buffer
        self.buffer = ShuffleBuffer(dataset, size, seed, name, lambda row, n: _row(row, config, n).value)
        self.packer = PACKERS[config.pack](length, end_of_text(tokenizer))
        self.side = _split(config, split)
        self.index = 0
        self.documents = 0  # in this epoch: without any, reading on would never end

    def __next__(self) -> Sample:
        while (cut := self.packer.pop()) is None:
            if self.epochs is not None and self.buffer.epoch >= self.epochs:
                raise StopIteration
            self._push_next()
        self.index += 1
        return sample_of(cut, self.index - 1)

    def _push_next(self) -> None:
        """Draw one row; when it is of this split and not empty, hand its document to the packer."""
        drawn = self.buffer.next()
        if drawn is None:
            if self.documents == 0:
                chat = self.config.source == "chat"
                room = f" with an answer in its first {self.packer.length} tokens" if chat else ""
                raise UserError(f'data.dataset = "{self.config.dataset}" has no text{room} in its {self.split} split')
            self.documents = 0
            return
        row = _row(drawn[1], self.config, drawn[0])
        if not self.side.takes(row.key, row.key, self.split):
            return
        for document in encode_rows([row], self.config, self.tokenizer):
            self.documents += self.packer.push(document)

    def state_dict(self) -> dict[str, Any]:
        state = {"buffer": self.buffer.state_dict(), "packer": self.packer.state_dict()}
        place = {"index": self.index, "documents": self.documents, "epoch": self.buffer.epoch}
        return {"kind": "datasets", **place, **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("kind") != "datasets":
            raise UserError(f"the checkpoint's data is {state.get('kind')!r}, not a streamed dataset: keep [data]")
        self.index, self.documents = state["index"], state["documents"]
        self.buffer.load_state_dict(state["buffer"])
        self.packer.load_state_dict(state["packer"])
