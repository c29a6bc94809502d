"""zstd dictionaries of a store: what they save, who can read with them, when they go."""

import numpy as np
import pytest

from dlm.errors import UserError
from dlm.trace import TraceStore, from_map
from dlm.trace.events import NEVER
from tests.refusals import refused
from tests.trace.synthetic import run


def test_a_dictionary_makes_records_smaller_and_others_can_read_them(tmp_path):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 30_000, (50, 12))

    def text(i: int):
        made = run(np.random.default_rng(i), 96, 24, name=f"r{i}", meta={"seed": i}).trace
        made.first_token[:] = words[np.random.default_rng(i).integers(0, 50, 8)].ravel()
        made.first_step[made.first_step == NEVER] = 0
        return made

    with TraceStore(tmp_path / "t.db") as store:
        refused("too few", store.train_dict)
        for i in range(200):
            store.put(text(i))
        before = store.stats()["record_bytes"]
        assert store.train_dict() == 1
        assert store.recompress() > 0.2 * before
        store.put(text(200))
    with TraceStore(tmp_path / "t.db") as store:
        for i in (0, 199, 200):
            np.testing.assert_array_equal(store[f"r{i}"].states(), text(i).states())
        dictionary = store.database.query("SELECT content FROM dictionaries")[0][0]
    with TraceStore(tmp_path / "u.db", dictionary=dictionary) as store:
        store.put(text(1))
        assert store["r1"].tokens.tolist() == text(1).tokens.tolist()
        assert store.stats()["dictionaries"] == [1]
    with (
        pytest.raises(UserError, match="no trained zstd dictionary"),
        TraceStore(tmp_path / "v.db", dictionary=b"x" * 99) as s,
    ):
        s.put(text(1)).result()
    s._writer.errors.clear()


@pytest.mark.parametrize("count", [120, 101])
def test_redacting_leaves_nothing_in_dictionaries(tmp_path, count):
    secret = np.arange(20_001, 20_033, dtype=np.int32)
    needle, path = secret.astype("<u2").tobytes(), tmp_path / "t.db"
    with TraceStore(path) as store:
        for i in range(count):
            with store.record(f"r{i}", prompt=[*secret, i], mask_id=0) as rec:
                rec.step([*secret, i, 5])
        store.train_dict()
        store.recompress()
        assert needle in store.database.query("SELECT content FROM dictionaries")[0][0]
        if count == 101:
            store.gc(99)  # too few to learn from again
        assert store.redact() == len(store)
        assert store.stats()["dictionaries"] == ([2] if count == 120 else [])
        assert all(trace.tokens[-1] == 5 for trace in store)
        with store.record("new", prompt=[7], mask_id=0) as rec:
            rec.step([7, 5])
    assert all(needle not in file.read_bytes() for file in tmp_path.iterdir())
    with TraceStore(path) as store:
        assert store.fsck().ok and store["new"].tokens.tolist() == [7, 5]


def test_gc_deletes_dictionaries_that_no_trace_needs(tmp_path):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 30_000, (50, 12))

    def put(store: TraceStore, start: int) -> None:
        for i in range(start, start + 150):
            store.put(from_map(f"r{i}", words[rng.integers(0, 50, 8)].ravel(), np.arange(96), None))

    with TraceStore(tmp_path / "t.db") as store:
        put(store, 0)
        assert store.train_dict() == 1
        put(store, 150)  # with the first
        assert store.train_dict() == 2
        put(store, 300)  # with the second
        assert store.train_dict() == 3  # for what comes
        old = store.database.dictionary(1)
        assert store.gc(200) == 250
        assert store.stats()["dictionaries"] == [1, 2, 3]
        assert store.gc(150) == 50
        assert store.stats()["dictionaries"] == [2, 3]
        assert store.fsck().ok
        # Who began to write with it before it went brings it back.
        with TraceStore(tmp_path / "t.db", dictionary=old.as_bytes()) as late:
            late._writer.dictionary = lambda database: old
            put(late, 450)
        assert store.stats()["dictionaries"] == [1, 2, 3] and store.fsck().ok
