"""Opening a store's file where nothing can be written, and what is left of its dictionaries."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import UserError
from dlm.trace import TraceStore, from_map
from dlm.trace.reader import TraceReader

NOBODY = 65534


def as_nobody(work) -> int:
    """Do it in a process that may not write what others made; its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("writing", [False, True])  # whether its owner has it open meanwhile
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_store_that_cannot_be_written_can_be_read(writing):
    with tempfile.TemporaryDirectory() as name:  # not tmp_path: nobody may not enter that one
        folder = Path(name)
        with TraceStore(folder / "t.db") as store:
            for i in range(20):
                store.put(from_map(f"r{i}", np.arange(i + 1), np.arange(i + 1), None))
            if not writing:
                store.close()
            else:
                store.flush()
            for file in folder.iterdir():
                file.chmod(0o444)
            folder.chmod(0o555)

            def read() -> None:
                with TraceReader(folder / "t.db") as reader:
                    assert reader["r7"].tokens.tolist() == list(range(8)) and len(reader) == 20
                with TraceStore(folder / "t.db", create=False) as again:
                    assert "r19" in again
                    again.put(from_map("more", [1], [0], None))
                    with pytest.raises(UserError, match="cannot be written"):
                        again.flush()

            try:
                assert as_nobody(read) == 0
            finally:
                folder.chmod(0o755)
                for file in folder.iterdir():
                    file.chmod(0o644)


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
