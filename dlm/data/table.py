"""All documents of a corpus as one array of ids, and a stream of sequences cut from it."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.atomic import cache_folder, new_folder
from dlm.data.documents import Document
from dlm.data.samples import Sample, pad_row, sample_of
from dlm.errors import UserError

FORMAT = 1  # raised when the cached arrays change their meaning
BESIDE = ("prompt", "order")  # optional columns


@dataclass(frozen=True)
class TokenTable:
    """Documents end to end: `ids` (n,), `starts` (documents + 1,), and `prompt` and `order` (n,) when they have them."""

    ids: NDArray[Any]
    starts: NDArray[np.int64]
    prompt: NDArray[np.bool_] | None = None
    order: NDArray[np.int32] | None = None

    @classmethod
    def of(cls, documents: Iterable[Document], vocab_size: int) -> "TokenTable":
        """Lay documents end to end in the narrowest integers that hold the vocabulary."""
        dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        ids, prompts, orders, lengths = [], [], [], []
        for document in documents:
            ids.append(document.ids.astype(dtype))
            lengths.append(len(document.ids))
            if document.prompt is not None:
                prompts.append(document.prompt)
            if document.order is not None:
                orders.append(document.order)
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        beside = (np.concatenate(parts) if parts else None for parts in (prompts, orders))
        return cls(np.concatenate(ids) if ids else np.zeros(0, dtype), starts, *beside)

    def document(self, where: slice | NDArray[np.int64]) -> Document:
        """The tokens at these indices, with their prompt mask and order."""
        prompt, order = (None if values is None else np.asarray(values[where]) for values in (self.prompt, self.order))
        beside: dict[str, Any] = {"prompt": prompt, "order": order}
        return Document(np.asarray(self.ids[where]).astype(np.int32), **beside)

    def save(self, folder: Path) -> None:
        """Write the arrays as .npy files into a folder that appears whole."""
        with new_folder(folder) as temporary:
            for name, values in vars(self).items():
                if values is not None:
                    np.save(temporary / f"{name}.npy", values)

    @classmethod
    def open(cls, folder: Path) -> "TokenTable":
        """Map the saved arrays; pages are read when touched."""
        beside = [folder / f"{name}.npy" for name in BESIDE]
        return cls(
            np.load(folder / "ids.npy", mmap_mode="r"),
            np.load(folder / "starts.npy"),
            *(np.load(file, mmap_mode="r") if file.is_file() else None for file in beside),
        )


def cached_table(key: dict[str, Any], build: Callable[[], TokenTable], enabled: bool) -> TokenTable:
    """The table for `key` from the cache folder, or built and kept there; a folder that cannot be written is no error."""
    if not enabled:
        return build()
    digest = blake2b(json.dumps({**key, "format": FORMAT}, sort_keys=True).encode(), digest_size=16).hexdigest()
    folder = cache_folder() / "tokens" / digest
    if folder.is_dir():
        return TokenTable.open(folder)
    table = build()
    try:
        table.save(folder)
    except OSError:
        return table
    return TokenTable.open(folder)


class TableStream(Iterator[Sample]):
    """Sequences of a table in an order addressed by (seed, epoch), so that its whole state is one counter.

    fixed: an epoch lays the documents in a ring, rotates it by a random offset and cuts it, so that no token is always
    first. row: a document is a sequence. `epochs` None goes on for ever. Without `rotate`, as for the held-out split, the offset is 0.
    """

    def __init__(
        self,
        table: TokenTable,
        length: int,
        pack: str,
        end: int,
        seed: int,
        epochs: int | None,
        rotate: bool = True,
        what: str = "corpus",
        remedy: str = "add data, or lower the length",
    ) -> None:
        self.table, self.length, self.pack, self.end = table, length, pack, end
        self.seed, self.epochs, self.rotate = seed, epochs, rotate
        self.index = 0
        self._rows = _answerable(table, length) if pack == "row" else None
        self.samples_per_epoch = len(table.ids) // length if self._rows is None else len(self._rows)
        if self.samples_per_epoch == 0:
            raise UserError(
                f"the {what} holds {len(table.starts) - 1} documents with {len(table.ids)} tokens: not one sequence of "
                f"length {length}" + (" with an answer in it" if self._rows is not None else "") + f"; {remedy}"
            )

    def __next__(self) -> Sample:
        if self.epochs is not None and self.index >= self.epochs * self.samples_per_epoch:
            raise StopIteration
        sample = self.sample(self.index)
        self.index += 1
        return sample

    def sample(self, index: int) -> Sample:
        """The sample with this global number."""
        epoch, i = divmod(index, self.samples_per_epoch)
        place = int(_permutation(self.seed, epoch, self.samples_per_epoch)[i])
        cut = self._cut(epoch, place) if self._rows is None else self._row(int(self._rows[place]))
        return sample_of(cut, index)

    def _cut(self, epoch: int, place: int) -> Document:
        total = len(self.table.ids)
        draw = int(mix(np.array([epoch], np.uint64), self.seed ^ 0x0FF5E7)[0])
        offset = draw % total if self.rotate else 0
        where = (offset + place * self.length + np.arange(self.length)) % total
        return self.table.document(where)

    def _row(self, document: int) -> Document:
        piece = slice(int(self.table.starts[document]), int(self.table.starts[document + 1]))
        return pad_row(self.table.document(piece), self.length, self.end)

    def state_dict(self) -> dict[str, Any]:
        per = self.samples_per_epoch
        return {"kind": "table", "index": self.index, "samples_per_epoch": per, "epoch": self.index // per}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("kind") != "table" or state["samples_per_epoch"] != self.samples_per_epoch:
            raise UserError(
                f"the checkpoint's data position ({state.get('samples_per_epoch')} sequences an epoch) is not of this data "
                f"({self.samples_per_epoch}): resume with the same [data], tokenizer and length, and the same Python"
            )
        self.index = int(state["index"])


def _answerable(table: TokenTable, length: int) -> NDArray[np.int64]:
    """Documents with something to learn among their first `length` tokens."""
    starts, ends = table.starts[:-1], np.minimum(table.starts[1:], table.starts[:-1] + length)
    if table.prompt is None:
        return np.flatnonzero(ends > starts)
    answers = np.concatenate([[0], np.cumsum(~table.prompt, dtype=np.int64)])
    # A prompt that fits leaves room for padding, and padding counts as answer.
    return np.flatnonzero((answers[ends] > answers[starts]) | (ends - starts < length))


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    keys = mix(np.arange(n, dtype=np.uint64), seed + 0x5EED * (epoch + 1))
    return np.argsort(keys, kind="stable")


def mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """SplitMix64's finaliser over values and key: random numbers with an address (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = values + np.uint64((key * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        return z ^ (z >> np.uint64(31))
