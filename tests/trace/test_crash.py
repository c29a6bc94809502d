import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import UserError
from dlm.trace import TraceStore, from_map
from dlm.trace.session import StoreError
from tests.refusals import refused
from tests.trace.worker import made

WRITES = """
import sys, numpy as np
from dlm.trace import TraceStore, from_map
path, name, durability = sys.argv[1:]
store = TraceStore(path, durability)
i = 0
while True:
    some = [f"{name}-{i + j}" for j in range(1 if durability == "trace" else 8)]
    done = [store.put(from_map(n, np.random.default_rng(sum(n.encode()) * 7919).integers(0, 999, 64), np.arange(64), None, own={"h": sum(n.encode()) * 7919})) for n in some]
    for n, d in zip(some, done):
        d.result()
        print(n, flush=True)  # acknowledged
    i += len(some)
"""


@pytest.mark.parametrize("rounds", [2, pytest.param(17, marks=pytest.mark.slow)])  # of three writers
def test_killed_writers_lose_nothing_acknowledged(tmp_path, rounds):
    path, rng, acknowledged = tmp_path / "t.db", random.Random(0), []
    for number in range(rounds):
        logs = [tmp_path / f"log-{number}-{writer}" for writer in range(3)]
        writers = []
        for writer, log in enumerate(logs):
            argv = [sys.executable, "-c", WRITES, str(path), f"{number}.{writer}", ("trace", "group", "none")[writer]]
            with log.open("w") as out:
                writers.append(subprocess.Popen(argv, stdout=out))
        deadline = time.monotonic() + 600  # a busy machine starts programs slowly
        while not all(log.stat().st_size for log in logs) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(rng.random() * 0.3)
        for process in rng.sample(writers, 3):
            os.kill(process.pid, signal.SIGKILL)
            time.sleep(rng.random() * 0.02)
        for process in writers:
            process.wait()
        acknowledged += [line for log in logs for line in log.read_text().split("\n")[:-1]]
    assert len(acknowledged) >= 3 * rounds
    with TraceStore(path) as store:
        assert store.fsck().ok
        for name in acknowledged:
            trace = store[name]
            expected = np.random.default_rng(trace.own["h"]).integers(0, 999, 64)
            np.testing.assert_array_equal(trace.tokens, expected)


def random_trace(name: str, size: int = 4000):
    tokens = np.random.default_rng(sum(name.encode()) * 7919).integers(0, 30_000, size)
    return from_map(name, tokens, np.arange(size), None)


def test_a_full_disk_is_told_and_leaves_the_store_readable(tmp_path):
    with TraceStore(tmp_path / "t.db", "trace") as store:
        stored = []
        limit = store._writer.open_database

        def small():
            database = limit()
            database.sql.execute("PRAGMA max_page_count = 24")
            return database

        store._writer.open_database = small

        def fill():
            for i in range(100):
                store.put(random_trace(str(i)))
                stored.append(str(i))

        refused("full: make room", fill, error=StoreError)
        assert 3 < len(stored) < 50
        assert [row.request_id for row in store.ls()] == stored
        for name in stored:
            assert store[name].tokens.tolist() == random_trace(name).tokens.tolist()
        store._writer.close()
    with TraceStore(tmp_path / "t.db") as store:  # there is room again
        store.put(random_trace("more"))
        assert "more" in store and store.fsck().ok


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from tests.trace.test_crash import random_trace
from dlm.trace import TraceStore
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
store = TraceStore(sys.argv[1])
try:
    for i in range(200):
        store.put(random_trace(str(i))).result()
        print(i, flush=True)
except ValueError as error:
    print("error", type(error).__name__, flush=True)
try:
    store.close()
except ValueError as error:
    print("close", type(error).__name__)
"""


def test_a_limit_on_files_is_told_too(tmp_path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "t.db")], capture_output=True, text=True, cwd=root
    )
    lines = done.stdout.split("\n")
    assert "error StoreError" in lines, done.stderr
    stored = lines[: lines.index("error StoreError")]
    assert len(stored) > 3
    with TraceStore(tmp_path / "t.db") as store:
        for name in stored:
            assert len(store[name].tokens) == 4000


def test_an_accepted_trace_cannot_be_cancelled(tmp_path):
    with TraceStore(tmp_path / "t.db") as store:
        done = store.put(made("r0", 0, 0))
        assert not done.cancel()
        store.put(made("r1", 1, 0))
        store.flush()
        assert len(store) == 2


@pytest.mark.parametrize("closes", [True, False])
def test_a_put_waits_for_room_and_is_refused_where_the_store_closes_meanwhile(tmp_path, closes):
    gate, errors = threading.Event(), []
    store = TraceStore(tmp_path / "t.db", queue_size=1)
    settle = store._writer.dictionary

    def slow(database):
        gate.wait(10)
        return settle(database)

    store._writer.dictionary = slow
    store.put(made("r0", 0, 0))
    while store._writer.queue:
        pass
    store.put(made("r1", 1, 0))

    def waits() -> None:
        try:
            store.put(made("r2", 2, 0))
        except UserError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=waits)
    waiting.start()
    while not store._writer.changed._waiters:  # it waits for room
        pass
    store._writer.closing = closes
    gate.set()
    waiting.join(10)
    store.close()
    assert errors == ["trace 'r2': the store is closed"] * closes
    with TraceStore(tmp_path / "t.db") as store:
        assert [row.request_id for row in store.ls()] == ["r0", "r1", "r2"][: 3 - closes]
