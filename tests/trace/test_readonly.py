import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlm.trace import TraceStore
from tests.trace.worker import made

ROOT = Path(__file__).parents[2]
# It becomes another user, if it may, when everything is imported: that one need not be able to read Python.
READER = """
import os, sys
import concurrent.futures.thread, urllib.parse, dlm.trace.upkeep, dlm.trace.fsck, dlm.trace.record, tests.trace.worker
from pathlib import Path
from dlm.errors import UserError
from dlm.trace import TraceStore
from dlm.trace.reader import TraceReader
from tests.trace.worker import proof
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
path = Path(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except UserError as error:
        print(type(error).__name__, error, flush=True)
"""


class Other:
    """A process that may not write what this one made."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER, str(path)], stdin=-1, stdout=-1, text=True, cwd=ROOT
        )
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        assert self.stdout.readline() == "ready\n"

    def __call__(self, expression: str) -> str:
        self.stdin.write(expression + "\n")
        self.stdin.flush()
        return self.stdout.readline().rstrip("\n")


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # not tmp_path: another user may not enter that one
        yield Path(name) / "t.db"
        Path(name).chmod(0o755)


@pytest.fixture
def other(path: Path) -> Iterator[Other]:
    process = Other(path)
    yield process
    process.stdin.close()
    process.process.wait()
    process.stdout.close()


def shut(path: Path, mode: int = 0o444) -> None:
    for file in path.parent.iterdir():
        file.chmod(mode)
    path.parent.chmod(0o555)


def opened(path: Path) -> None:
    path.parent.chmod(0o755)
    for file in path.parent.iterdir():
        file.chmod(0o644)


def put(store: TraceStore, *numbers: int) -> None:
    for i in numbers:
        store.put(made(f"r{i}", i, 0))
    store.flush()


def test_a_reader_follows_what_the_owner_does(path, other):
    with TraceStore(path) as store:
        put(store, *range(120))
    shut(path)
    assert other("(reader := TraceReader(path))").startswith("<") and other("len(reader)") == "120"
    assert other("(again := TraceStore(path, create=False)).stats()['traces']") == "120"
    opened(path)
    with TraceStore(path) as store:  # the owner comes back
        put(store, 500)
        shut(path)
        assert other("len(reader)") == other("len(again)") == "121"
        opened(path)
        store.gc(110)
        store.train_dict()
        store.recompress()
        put(store, 501)
        shut(path)
        assert other("len(reader)") == "111"
        assert other("all(t.own['seed'] == int(t.request_id[1:]) for t in reader)") == "True"
        opened(path)
    shut(path)  # and goes
    assert other("sorted(reader['r501'].own.items())") == "[('seed', 501)]"
    assert other("again.fsck().ok, len(again.find(model='m1')), len(list(again))") == "(True, 36, 111)"
    opened(path)
    with TraceStore(path) as store:
        store.gc(1)
    shut(path)
    assert other("[row.request_id for row in reader.ls()], len(again)") == "(['r501'], 1)"


def test_what_needs_writing_says_so(path, other):
    with TraceStore(path) as store:
        put(store, *range(3))
    shut(path)
    other("(store := TraceStore(path, create=False))")
    for call in ("gc(1)", "redact()", "recompress()", "put(store['r1'], overwrite=True).result()"):
        said = other(f"store.{call}")
        assert said.startswith("StoreError") and said.endswith("it cannot be written"), said
    assert other("len(store)") == "3"


KILLED = """
import os, sys
from dlm.trace import TraceStore
from tests.trace.worker import made
store = TraceStore(sys.argv[1])
store.put(made("r7", 7, 0)).result()
os._exit(0)
"""


def test_a_log_that_was_left_is_read_or_named(path, other):
    with TraceStore(path) as store:
        put(store, 1)
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=True, cwd=ROOT)
    assert path.with_name("t.db-wal").stat().st_size
    shut(path)
    assert other("sorted(row.request_id for row in TraceReader(path).ls())") == "['r1', 'r7']"
    opened(path)
    path.with_name("t.db-shm").unlink()
    shut(path)
    said = other("len(TraceReader(path))")
    assert "t.db-wal: this log was not merged into t.db" in said and "dlm-trace stats" in said
    opened(path)
    with TraceStore(path) as store:
        assert len(store) == 2
    shut(path)
    assert other("len(TraceReader(path))") == "2"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_a_reader_leaves_nothing_where_it_may(path, other):
    """In a folder that anyone may write, SQLite would make files that lock the owner out."""
    with TraceStore(path) as store:
        put(store, 1)
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=True, cwd=ROOT)
    path.with_name("t.db-shm").unlink()
    path.chmod(0o444)
    path.parent.chmod(0o777)
    assert "was not merged" in other("len(TraceReader(path))")
    assert sorted(file.name for file in path.parent.iterdir()) == ["t.db", "t.db-wal"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_what_may_not_be_read_is_named(path, other):
    with TraceStore(path) as store:
        put(store, 1)
        shut(path)
        path.with_name("t.db-wal").chmod(0o600)
        assert "t.db-wal: you may not read it, and t.db is being written" in other("len(TraceReader(path))")
        path.chmod(0o600)
        assert "t.db: you may not read it; its owner can allow it (chmod a+r)" in other("len(TraceReader(path))")
        opened(path)
