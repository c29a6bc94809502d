"""Recorded steps: on a GPU one CUDA graph serves all steps of a bucket, from tokens in to decisions out.

Launching a layer's kernels one by one costs the host more than a GPU needs to run them when rows are few. Every number
that a step's kernels read lies in one static buffer, padded to the bucket's sizes: spans of no rows, rows that write no
keys and decide nothing. No kernel of ours gives a row another result for it; a library's products may round by how many
rows they have, unless the engine is deterministic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dlm.inference.buckets import Bucket, counted
from dlm.inference.decide import Round
from dlm.inference.forward import attend_of, products, states_and_taps
from dlm.inference.layout import Layout, lengthen_rope
from dlm.inference.pages import PagePool
from dlm.inference.transfers import Part, packed, parts_of, places_of, unpacked, views
from dlm.kernels.paths import Path
from dlm.models.transformer import Transformer

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""A computation -> what runs it again, and the tensor its result is in afterwards."""
MOST = 256
"""Graphs that are kept, the latest used."""


@dataclass(eq=False)
class Recording:
    """One bucket's static memory and, once recorded, its graph."""

    bucket: Bucket
    host: Tensor
    """Pinned bytes."""
    there: Tensor
    """The device's."""
    x: dict[str, Tensor]
    """Their parts."""
    memory: dict[str, np.ndarray]
    """The parts of the pinned bytes."""
    bytes_: np.ndarray
    """All of them."""
    blank: np.ndarray
    """What they are where there is only padding."""
    tail: tuple[int, Tensor, Tensor]
    """Where those parts begin that change with each step; the pinned bytes and the device's from there on."""
    sent: torch.cuda.Event | None
    """The device has read the pinned bytes."""
    filled: Mapping[str, np.ndarray] | None = None
    """The layout's arrays that they hold."""
    taps: Tensor | None = None
    """Outputs of the tapped layers, of all rows."""
    parts: list[Part] = field(default_factory=list)
    """Where in its result which array lies."""
    met: bool = False
    """Whether it was computed once."""
    graph: tuple[Callable[[], None], Tensor] | None = None

    @classmethod
    def of(cls, bucket: Bucket, device: torch.device) -> "Recording":
        blank = bucket.blank()
        places, size = places_of(blank)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there = torch.empty(size, dtype=torch.uint8, device=device)
        bytes_ = host.numpy()
        memory = {n: bytes_[places[n] : places[n] + a.nbytes].view(a.dtype).reshape(a.shape) for n, a in blank.items()}
        for name, values in blank.items():
            memory[name][...] = values
        sent = torch.cuda.Event() if device.type == "cuda" else None
        tail = places["ids"], host[places["ids"] :], there[places["ids"] :]
        return cls(bucket, host, there, views(there, blank), memory, bytes_, bytes_.copy(), tail, sent)

    def fill(self, layout: Mapping[str, np.ndarray], step: Mapping[str, np.ndarray]) -> None:
        """Put a layout's arrays, unless they are there, and a step's into the device's memory.

        The device has then read those of the step before.
        """
        if self.sent is not None:
            self.sent.synchronize()
        start, host, there = self.tail
        if self.filled is not layout:
            self.filled, host, there = None, self.host, self.there
            self.bytes_[:start] = self.blank[:start]
            self._put(layout)
            rows = layout["starts"]
            self.memory["starts"][len(rows) :] = rows[-1]
        self.bytes_[start:] = self.blank[start:]
        self._put(step)
        there.copy_(host, non_blocking=True)
        self.filled = layout
        if self.sent is not None:
            self.sent.record()

    def _put(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, given in arrays.items():
            memory = self.memory[name]
            if given.ndim == 1:
                memory[: len(given)] = given
            else:
                memory[: given.shape[0], : given.shape[1]] = given


class Graphs:
    """One engine's graphs: each bucket is run once as it is, which compiles its kernels, then recorded, then replayed."""

    def __init__(self, network: Transformer, path: Path, deterministic: bool, capture: Capture) -> None:
        self.network, self.path, self.deterministic, self.capture = network, path, deterministic, capture
        self.recorded: dict[Bucket, Recording] = {}
        self.captures = self.replays = 0
        self.taps: Tensor | None = None
        """Of the last step, (n, m, d): outputs of its tapped layers, of all rows."""
        self._rope: object = None
        self._latest: tuple[tuple, Recording] | None = None
        """What the last step's bucket followed from, and its recording."""

    def run(
        self,
        layout: Layout,
        ids: np.ndarray,
        output_rows: np.ndarray,
        rounds: Sequence[Round] = (),
        tapped: tuple[int, ...] = (),
        late: Sequence[tuple[Tensor, np.ndarray]] = (),
    ) -> Callable[[], list[np.ndarray]] | Tensor | None:
        """What reads what the step's only round is decided by or, where there are more, hidden states; None where no
        bucket fits. `late` are tokens that only the device knows, and their rows: all tokens are then read last.
        """
        only = rounds[0] if len(rounds) == 1 and rounds[0].repeatable else None
        recording = self._recording(layout, output_rows, only, tapped, bool(late))
        if recording is None:
            return None
        given = {"ids": ids, "rows": output_rows}
        if only is not None:
            given |= only.arrays
            if (columns := recording.bucket.columns) != only.shape[1]:
                given["at"] = only.owner * columns + only.column
        if late:
            given["late"] = np.concatenate([rows for _, rows in late])
        recording.fill(layout.arrays, given)
        if late:
            x, tokens = recording.x, torch.cat([tokens for tokens, _ in late])
            x["ids"].index_copy_(0, x["late"][: len(tokens)], tokens)
        found = self._compute(recording, layout.pool)
        self.taps = None if recording.taps is None else recording.taps[: layout.rows]
        return found[: len(output_rows)] if only is None else partial(unpacked, found, recording.parts)

    def clear(self) -> None:
        """Forget all recordings: what they read is no longer there."""
        self.recorded.clear()
        self._latest = None

    def _recording(
        self, layout: Layout, output_rows: np.ndarray, only: Round | None, tapped: tuple[int, ...], late: bool
    ) -> Recording | None:
        """That of a step's bucket; None where it is too large for any."""
        facts = layout, *counted(output_rows, only), tapped, late
        if self._latest is not None and self._latest[0] == facts:
            return self._latest[1]
        bucket = Bucket.of(layout, output_rows, only, tapped, late)
        if bucket is None:
            return None
        self._keep_rope(layout)
        recording = self.recorded.pop(bucket, None) or Recording.of(bucket, layout.device)
        self.recorded[bucket] = recording  # now the latest
        if len(self.recorded) > MOST:
            del self.recorded[next(iter(self.recorded))]
        self._latest = facts, recording
        return recording

    def _compute(self, recording: Recording, pool: PagePool) -> Tensor:
        if not recording.met:
            return self._program(recording, pool)
        if recording.graph is None:
            recording.graph = self.capture(lambda: self._program(recording, pool))
            self.captures += 1
        replay, result = recording.graph
        replay()
        self.replays += 1
        return result

    def _program(self, recording: Recording, pool: PagePool) -> Tensor:
        """A step on the device: hidden states, or the bytes of its decisions."""
        network, bucket, x = self.network, recording.bucket, recording.x
        most = bucket.longest, bucket.pages * pool.page_size
        attend, positions = attend_of(network, pool, x, most, 0)
        with products(self.deterministic):
            hidden, recording.taps = states_and_taps(network, x, positions, attend, bucket.tapped)
            recording.met = True
            if (recipe := bucket.recipe) is None:
                return hidden
            logits = recipe.logits(network, network.head, hidden, x)
        found, _ = recipe.decide(logits, x, network.config.mask_token_id)
        if bucket.late:
            found = [*found, x["ids"]]
        recording.parts = parts_of(found)
        return packed(found)

    def _keep_rope(self, layout: Layout) -> None:
        """The table of rotations, which recordings read, reaches far enough and is where it was."""
        lengthen_rope(self.network, layout.pool, layout.furthest)
        if self._rope is not layout.pool.rope:
            self._rope = layout.pool.rope
            self.clear()


def cuda_graphs() -> Capture:
    """Record what a computation launches; all recordings share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result

    return capture
