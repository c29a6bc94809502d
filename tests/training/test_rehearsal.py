from collections import Counter
from itertools import islice

import numpy as np
import pytest

from dlm.data.loader import BatchLoader
from dlm.training.loop import train
from dlm.training.rehearsal import RehearsalStream, pack, unpack
from dlm.training.run import Run
from dlm.training.sections import ReplayConfig
from tests.refusals import refused
from tests.training.runs import config


class Counting:
    """Samples 0, 1, 2, …, each its number as ids."""

    def __init__(self, count: int = 10**9) -> None:
        self.at, self.count = 0, count

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        row = np.full(3, self.at - 1, np.int32)
        return {"input_ids": row, "index": self.at - 1, "prompt_mask": row % 2 == 0, "order": row - 1}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def replay(seed: int = 0, batch_size: int = 8, count: int = 10**9, **options) -> RehearsalStream:
    settings = {"fraction": 0.25, "size": 40, **options}
    return RehearsalStream(Counting(count), ReplayConfig(**settings), batch_size, seed)


def batches(stream: RehearsalStream, count: int) -> list[list[int]]:
    return [[int(s["input_ids"][0]) for s in islice(stream, stream.batch_size)] for _ in range(count)]


def test_each_batch_ends_with_rows_of_earlier_ones():
    found = batches(replay(start=3), 40)
    assert [number for batch in found[:3] for number in batch] == list(range(24))
    new = [batch[:6] for batch in found[3:]]
    assert [number for batch in new for number in batch] == list(range(24, 24 + 6 * 37))
    for batch in found[3:]:
        assert len(set(batch[6:])) == 2 and max(batch[6:]) < batch[0]


def test_rows_come_whole_and_are_numbered_anew():
    samples = list(islice(replay(), 80))
    assert [s["index"] for s in samples] == list(range(80))
    for sample in samples:
        number = sample["input_ids"][0]
        assert (sample["prompt_mask"] == (number % 2 == 0)).all() and (sample["order"] == number - 1).all()
        assert sample["input_ids"].dtype == np.int32 and sample["prompt_mask"].dtype == np.bool_


@pytest.mark.parametrize("names", [("input_ids",), ("input_ids", "prompt_mask"), ("input_ids", "prompt_mask", "order")])
def test_packed_rows_are_the_rows(names):
    sample = {"index": 7, **{name: next(Counting())[name] for name in names}}
    again = unpack(pack(sample))
    assert again.keys() == sample.keys() and all((again[name] == sample[name]).all() for name in names)


def test_the_kept_rows_are_a_uniform_sample_and_so_are_the_drawn_ones():
    kept, drawn = Counter(), Counter()
    for seed in range(200):
        stream = replay(seed, size=10, fraction=0.5)
        drawn.update(batches(stream, 26)[25][4:])
        kept.update(int(unpack(row)["input_ids"][0]) for row in stream.rows)
    # 104 rows were seen before the last batch's draw or in it; each is kept by 10 of 104 buffers.
    for counts, each in ((kept, 200 * 10 / 108), (drawn, 200 * 4 / 104)):
        observed = np.array([counts[number] for number in range(108 if counts is kept else 104)])
        chi = ((observed - each) ** 2 / each).sum()
        assert abs(chi - len(observed)) < 5 * (2 * len(observed)) ** 0.5


def test_another_seed_draws_other_rows():
    assert batches(replay(0), 20) != batches(replay(1), 20) and batches(replay(0), 20) == batches(replay(0), 20)


def test_the_state_after_any_batch_is_all_there_is():
    straight = batches(replay(), 30)
    for stop in (0, 1, 9, 29):
        first, second = replay(), replay()
        assert batches(first, stop) == straight[:stop]
        second.load_state_dict(first.state_dict())
        batches(first, 2)  # what the first does later is its own affair
        assert batches(second, 30 - stop) == straight[stop:]


def test_a_loader_reads_it_like_any_stream():
    whole = [b["input_ids"][:, 0].tolist() for b in islice(BatchLoader(replay(), 8), 12)]
    assert whole == batches(replay(), 12)
    halves = [BatchLoader(replay(), 8, rank, 2, prefetch=rank) for rank in range(2)]
    for expected in whole:
        assert [n for half in halves for n in next(half)["input_ids"][:, 0].tolist()] == expected
    halves[1].close()
    assert sum(1 for _ in BatchLoader(replay(count=50), 8)) == 8  # of eight new ones, and then of six


def test_fractions_of_no_row_or_all_rows_are_refused():
    refused(r"replay\.fraction = 0\.01 of train\.batch_size = 8 is 0 rows", replay, fraction=0.01)
    refused("is 8 rows", replay, fraction=0.99)


def test_it_changes_the_run_and_is_off_by_default(tmp_path):
    plain = train(config(tmp_path, "plain", eval__sequences="0"))
    mixed = train(config(tmp_path, "mixed", eval__sequences="0", replay__fraction="0.5", checkpoint__every="4"))
    assert plain.losses[0] == mixed.losses[0] and plain.losses[1:] != mixed.losses[1:]
    assert not isinstance(Run(config(tmp_path, "plain")).loader.stream, RehearsalStream)
    other = Run(config(tmp_path, "mixed", eval__sequences="0"))
    refused(r"replay\.fraction = 0\.5, but now replay\.fraction = 0\.0", other.resume)
