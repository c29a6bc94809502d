"""[replay]: mixes past samples into the stream, against forgetting."""

import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm.data.documents import Document
from dlm.data.loader import SampleStream
from dlm.data.samples import Sample, sample_of
from dlm.data.table import mix
from dlm.errors import UserError
from dlm.training.sections import ReplayConfig

COLUMNS = ("input_ids", "prompt_mask", "order")  # a sample has the first column, the first two, or all
RESERVOIR, DRAWS = 0x4EB1A1, 0x4EB1A2  # keys that no other draw uses


class RehearsalStream(Iterator[Sample]):
    """Each batch of `batch_size` samples ends with some of earlier batches, drawn uniformly and each at most once.

    It draws from a reservoir, itself a uniform sample of all new samples of earlier batches (Vitter's algorithm R).
    Random numbers are addressed by (seed, batch) and every process sees the same stream, so a checkpoint needs the kept
    rows only. These are compressed once and shared by all states.
    """

    def __init__(self, stream: SampleStream, config: ReplayConfig, batch_size: int, seed: int) -> None:
        self.stream, self.config, self.batch_size, self.seed = stream, config, batch_size, seed
        self.replayed = round(config.fraction * batch_size)
        if not 0 < self.replayed < batch_size:
            raise UserError(
                f"replay.fraction = {config.fraction} of train.batch_size = {batch_size} is {self.replayed} rows: "
                "a batch needs a new one and a past one at least"
            )
        self.rows: list[bytes] = []
        self.batch = self.seen = 0
        self.waiting: deque[Sample] = deque()

    def __next__(self) -> Sample:
        if not self.waiting:
            self._prepare()
        return self.waiting.popleft()

    def _prepare(self) -> None:
        """Prepare the next batch. Its samples get new numbers, so that a past row gets other masks."""
        past = self._past()
        new: list[Sample] = []
        for sample in self.stream:
            new.append(sample)
            if len(new) + len(past) == self.batch_size:
                break
        if not new:
            raise StopIteration
        first = self.batch * self.batch_size
        for place, sample in enumerate([*new, *past]):
            self.waiting.append({**sample, "index": first + place})
        for sample in new:
            self._keep(pack(sample))
        self.batch += 1

    def _past(self) -> list[Sample]:
        """The past rows of this batch, drawn by the first steps of a Fisher-Yates shuffle."""
        count = len(self.rows)
        if self.batch < self.config.start or count < self.replayed:
            return []
        numbers = mix(np.arange(self.replayed, dtype=np.uint64) + np.uint64(self.batch << 32), self.seed ^ DRAWS)
        moved: dict[int, int] = {}
        chosen = []
        for place, number in enumerate(numbers.tolist()):
            other = place + number % (count - place)
            chosen.append(moved.get(other, other))
            moved[other] = moved.get(place, place)
        return [unpack(self.rows[slot]) for slot in chosen]

    def _keep(self, row: bytes) -> None:
        """Keep the row with probability size / seen, in place of a random other."""
        self.seen += 1
        if len(self.rows) < self.config.size:
            self.rows.append(row)
            return
        slot = int(mix(np.array([self.seen], np.uint64), self.seed ^ RESERVOIR)[0]) % self.seen
        if slot < self.config.size:
            self.rows[slot] = row

    def state_dict(self) -> dict[str, Any]:
        assert not self.waiting, "a state is taken between batches"
        stream = self.stream.state_dict()
        counters = {"batch": self.batch, "seen": self.seen, "epoch": stream.get("epoch")}
        return {"kind": "replay", **counters, "rows": list(self.rows), "stream": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("kind") != "replay":
            raise UserError(f"the checkpoint's data is of kind {state.get('kind')!r}, without replay: keep [replay]")
        self.batch, self.seen, self.rows = state["batch"], state["seen"], list(state["rows"])
        self.stream.load_state_dict(state["stream"])
        self.waiting.clear()


def pack(sample: Sample) -> bytes:
    """A sample without its number, as compressed columns of int32."""
    columns = [np.asarray(column, np.int32) for name in COLUMNS if (column := sample.get(name)) is not None]
    return bytes([len(columns)]) + zlib.compress(np.stack(columns).tobytes(), level=1)


def unpack(row: bytes) -> Sample:
    """The sample again, with 0 for its number."""
    ids, *beside = np.frombuffer(zlib.decompress(row[1:]), np.int32).reshape(row[0], -1)
    prompt = beside[0].astype(np.bool_) if beside else None
    return sample_of(Document(ids, prompt, *beside[1:]), 0)
