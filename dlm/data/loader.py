"""Batches of a stream for one rank, and the exact position to go on from."""

import atexit
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, NotRequired, Protocol, Self, TypedDict, runtime_checkable

import numpy as np
import torch

from dlm.data.samples import Sample
from dlm.errors import UserError

PATIENCE = 2.0
"""Seconds that a program that ends early waits for the batch being read: a read may hang, for example on a network."""


@runtime_checkable
class SampleStream(Iterator[Sample], Protocol):
    """Samples in an order that depends on config and seed alone, resumable after any of them."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Batch(TypedDict):
    """One rank's rows of a step: ids (b, length) int64, prompt mask (b, length) bool or None, sample numbers (b,).

    `order` (b, length) is there for traces: the step that committed each token, -1 for none.
    """

    input_ids: torch.Tensor
    prompt_mask: torch.Tensor | None
    index: torch.Tensor
    order: NotRequired[torch.Tensor]


class BatchLoader(Iterator[Batch]):
    """This rank's rows of every global batch. All ranks read the same stream, so one process gets the rows of many
    together.

    `state_dict` is the position after the last batch handed out, however far `prefetch` has read ahead. A last batch
    that is not full is dropped unless `keep_partial`, which only one rank can ask for. Used as a context, it stops
    reading ahead at the end; left by an error, without waiting for a read that hangs.
    """

    def __init__(
        self,
        stream: SampleStream,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 0,
        keep_partial: bool = False,
    ) -> None:
        if batch_size < 1 or batch_size % world_size:
            raise UserError(f"batch_size = {batch_size} does not divide among {world_size} processes: use a multiple")
        if not 0 <= rank < world_size:
            raise UserError(f"rank = {rank} is not in 0..{world_size - 1}")
        if keep_partial and world_size > 1:
            raise UserError("keep_partial needs world_size = 1: a partial batch may leave a rank without rows")
        self.stream, self.batch_size, self.rank, self.world_size = stream, batch_size, rank, world_size
        self.prefetch, self.keep_partial = prefetch, keep_partial
        self._state = stream.state_dict()
        self._ahead: _Ahead | None = None

    def __next__(self) -> Batch:
        if self.prefetch == 0:
            batch, self._state = self._read()
        else:
            self._ahead = self._ahead or _Ahead(self._read, self.prefetch)
            batch, self._state = self._ahead.next()
        if batch is None:
            raise StopIteration
        return batch

    def _read(self) -> tuple[Batch | None, dict[str, Any]]:
        before = self.stream.state_dict()
        samples: list[Sample] = []
        for sample in self.stream:
            samples.append(sample)
            if len(samples) == self.batch_size:
                break
        if not samples or (len(samples) < self.batch_size and not self.keep_partial):
            return None, before
        share = self.batch_size // self.world_size
        return collate(samples[self.rank * share : (self.rank + 1) * share]), self.stream.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Position after the last batch handed out; it does not depend on rank, world size or prefetch."""
        return self._state

    @property
    def epoch(self) -> int | None:
        """The number of epochs completed at the last batch handed out; None for endless data."""
        return self._state.get("epoch")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch that `state` was taken at."""
        self.close()
        self.stream.load_state_dict(state)
        self._state = self.stream.state_dict()

    def close(self, patience: float | None = None) -> None:
        """Stop reading ahead, and put the stream back to the last batch handed out.

        Waits `patience` seconds, or without limit, for the batch being read. One that hangs longer is left alone; the
        loader is then of no further use.
        """
        if self._ahead is not None and self._ahead.stop(patience):
            self._ahead = None
            self.stream.load_state_dict(self._state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else PATIENCE)


def collate(samples: list[Sample]) -> Batch:
    """Stack samples; a batch has prompt masks when any sample has one."""
    masks = None
    if any("prompt_mask" in s for s in samples):
        rows = [s.get("prompt_mask", np.zeros(len(s["input_ids"]), np.bool_)) for s in samples]
        masks = torch.from_numpy(np.stack(rows))
    batch: Batch = {
        "input_ids": torch.from_numpy(np.stack([s["input_ids"] for s in samples]).astype(np.int64)),
        "prompt_mask": masks,
        "index": torch.tensor([s["index"] for s in samples], dtype=torch.int64),
    }
    orders = [s["order"] for s in samples if "order" in s]
    if orders:
        batch["order"] = torch.from_numpy(np.stack(orders).astype(np.int64))
    return batch


class _Ahead:
    """Reads up to `depth` batches ahead in a thread, each with the state after it.

    An error in the thread is raised by `next`. The thread is a daemon: for any other, Python's exit waits without
    limit.
    """

    def __init__(self, read: Callable[[], tuple[Batch | None, dict[str, Any]]], depth: int) -> None:
        self._read, self._found, self._room, self._stopped = read, SimpleQueue(), Semaphore(depth), False
        self._last: BaseException | tuple[None, dict[str, Any]] | None = None  # for all further calls
        self._thread = Thread(target=self._run, name="dlm-prefetch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def next(self) -> tuple[Batch | None, dict[str, Any]]:
        """The next batch and its state; None for a batch at the end of the data."""
        found = self._found.get() if self._last is None else self._last
        if isinstance(found, BaseException) or found[0] is None:
            self._last = found
        if isinstance(found, BaseException):
            raise found
        self._room.release()
        return found

    def stop(self, patience: float | None = PATIENCE) -> bool:
        """Read no further; returns whether the read under way ended within `patience` seconds (None: no limit)."""
        atexit.unregister(self.stop)
        self._stopped, self._last = True, UserError("this loader was closed while it read: make a new one")
        self._room.release()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._room.acquire() and not self._stopped:
            try:
                found = self._read()
            except BaseException as error:
                self._found.put(error)
                return
            self._found.put(found)
            if found[0] is None:
                return
