import os
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dlm.errors import UserError
from dlm.trace import CorruptTrace, DuplicateTrace, TraceStore, UnknownTrace
from dlm.trace.events import NEVER
from dlm.trace.session import StoreError
from dlm.trace.times import iso, moment, seconds, ticks
from tests.refusals import refused
from tests.trace.synthetic import run

HOSTILE = [*["../../etc/passwd", "a/b", "a_b", "%", "_", "NULL", "A_B"], "", " ", "\x00", "a\x00b"]
HOSTILE += ["'; DROP TABLE traces; --", "\u202e\U0001f600é" * 1500]


def trace(name: str, seed: int = 0, **options):
    return run(np.random.default_rng(seed), 16, 4, name=name, **options).trace


def test_hostile_ids_are_just_ids(store, tmp_path):
    for seed, name in enumerate(HOSTILE):
        store.put(trace(name, seed))
    assert len(store) == len(HOSTILE)
    assert [row.request_id for row in store.ls()] == HOSTILE
    for seed, name in enumerate(HOSTILE):
        assert name in store
        np.testing.assert_array_equal(store[name].states(), trace(name, seed).states())
    assert {path.name for path in tmp_path.iterdir()} <= {"traces.db", "traces.db-wal", "traces.db-shm"}


@pytest.mark.parametrize(
    ("name", "message"), [("x" * 70_000, "more than 65536"), ("\ud800", "no Unicode"), (7, "text")]
)
def test_what_is_no_id(store, name, message):
    refused(message, store.put, trace("x").__class__(**{**vars(trace("x")), "request_id": name}))
    with pytest.raises(UserError, match=message):
        store[name]


def test_a_taken_id_is_refused_before_the_work(filled):
    for _ in range(2):
        refused("overwrite=True", filled.record, "first", prompt=[1], error=DuplicateTrace)
    filled.put(trace("first"))
    with pytest.raises(DuplicateTrace):
        filled.flush()
    filled.put(trace("first", 9), overwrite=True).result()
    np.testing.assert_array_equal(filled["first"].states(), trace("first", 9).states())
    assert len(filled) == 3


def test_an_unknown_id_names_the_nearest(filled):
    with pytest.raises(UnknownTrace, match="nearest (is|are) .*first") as caught:
        filled["frist"]
    assert isinstance(caught.value, KeyError)
    with pytest.raises(UnknownTrace, match="newest are third/1"):
        filled["zzzzzzzzzzz"]


def test_finding(filled):
    assert [row.request_id for row in filled.find(model="pico")] == ["first", "second"]
    assert [row.request_id for row in filled.find(model="pico", newest=1)] == ["second"]
    assert [row.request_id for row in filled.find(since="1h", newest=2)] == ["third/1", "second"]
    assert filled.find(until="1h") == filled.find(model="none") == filled.find(since=time.time() + 9) == []
    middle = filled.ls()[1].at
    assert [row.request_id for row in filled.ls()][1:] == [row.request_id for row in filled.find(since=middle / 1e4)]
    refused("is no time", filled.find, since="yesterday")
    assert seconds("1.5h") == 5400 and ticks("2020-01-01T00:00:00+00:00") == 15_778_368_000_000


def test_times_are_exact_and_what_is_none_is_an_error():
    at = 15_778_368_000_001
    assert iso(at) == "2020-01-01T00:00:00.000100+00:00" and ticks(iso(at)) == at
    assert ticks("99999999999d") < 0 < ticks(1e300)
    for say in (iso, moment):
        refused("are no time: the store is damaged", say, 2**60)
    refused("is no time", ticks, float("nan"))


def test_contexts_are_stored_once_and_facts_come_back(filled):
    assert filled.stats()["contexts"] == 2
    assert filled["first"].meta == {"model": "pico", "tokenizer": "tok", "sampler": {"block_length": 8}, "seed": 5}
    assert filled["first"].text(0).startswith(" w") and "░" in filled["first"].text(0)


@pytest.mark.parametrize("durability", ["trace", "group", "none"])
def test_what_was_put_is_seen_by_others(tmp_path, durability):
    with TraceStore(tmp_path / "t.db", durability) as store:
        store.put(trace("a"))
        assert "a" in store  # its own reader waits
        store.put(trace("b"))
        store.flush()
        with TraceStore(tmp_path / "t.db") as other:
            assert [t.request_id for t in other] == ["a", "b"]


def test_a_full_queue_raises(tmp_path):
    gate = threading.Event()

    class Slow(type(run(np.random.default_rng(0), 4, 2).recorder)):
        def trace(self):
            gate.wait(600)
            return super().trace()

    def slow(name):
        return Slow(name, [1, 2], mask_id=0)

    with TraceStore(tmp_path / "t.db", queue_size=1, on_full="raise") as store:
        store.put(slow("a"))
        while store._writer.queue:
            time.sleep(0.001)
        store.put(slow("b"))
        refused("wait to be written", store.put, slow("c"), error=StoreError)
        gate.set()
        store.flush()
        assert len(store) == 2


def test_a_broken_recording_is_told_and_harms_no_other(store):
    bad = run(np.random.default_rng(0), 4, 2).recorder
    bad.request_id = "bad"
    bad.meta = {"x": object()}
    store.put(trace("a"))
    done = store.put(bad)
    store.put(trace("b"))
    refused("must be JSON", store.flush)
    assert done.exception() is not None
    store.flush()  # told once
    assert len(store) == 2


def test_a_trace_that_contradicts_itself_is_refused(store):
    odd = trace("odd")
    odd.first_step[3] = NEVER  # but its token is there
    refused("contradicts itself", store.put(odd).result)
    store._writer.errors.clear()


def test_a_fraction_is_chosen_by_id(tmp_path):
    with TraceStore(tmp_path / "t.db", fraction=0.25) as store:
        chosen = [i for i in range(2000) if store.wants(str(i))]
        assert 400 < len(chosen) < 600
        assert chosen == [i for i in range(2000) if store.recorder(str(i), mask_id=0) is not None]


@pytest.mark.parametrize("how", ["hash", "omit"])
def test_redacted_prompts_are_gone_from_the_file(tmp_path, how):
    secret = np.arange(20_001, 20_101, dtype=np.int32)
    path = tmp_path / "t.db"
    with TraceStore(path) as store:
        with store.record("x", prompt=secret, mask_id=0, meta={"prompt": "my secret words"}) as rec:
            rec.step([*secret, 5])
        needle = secret.astype("<u2").tobytes()
        store.flush()
        old = store.database.record("x")[2][20:]
        assert old in (tmp_path / "t.db-wal").read_bytes()
        assert store.redact(["x"], how) == 1
        left = store["x"]
    everything = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert needle not in everything and old not in everything
    assert left.tokens.tolist() == [-2] * 100 + [5]
    assert ("prompt_digest" in left.meta) == (how == "hash")
    with TraceStore(tmp_path / "u.db", prompts=how) as store:
        with store.record("x", prompt=secret, mask_id=0) as rec:
            rec.step([*secret, 5])
        assert store["x"].tokens.tolist() == [-2] * 100 + [5]


def test_gc_keeps_the_newest(filled):
    assert filled.gc("1h") == 0
    assert filled.gc(1) == 2
    assert [row.request_id for row in filled.ls()] == ["third/1"]
    assert filled.stats()["contexts"] == 1
    refused("keep = 'x'", filled.gc, "x")
    assert filled.gc(0) == 1


def test_fsck_finds_what_is_damaged(filled):
    assert filled.fsck().ok
    with sqlite3.connect(filled.path) as direct:
        direct.execute("UPDATE traces SET record = substr(record, 1, 40) WHERE id = 'second'")
        direct.execute("UPDATE traces SET id = 'renamed' WHERE id = 'first'")
    direct.close()
    report = filled.fsck()
    assert not report.ok and set(report.damaged) == {"second", "renamed"} and report.traces == 1
    for name in report.damaged:
        with pytest.raises(CorruptTrace):
            filled[name]


@pytest.mark.parametrize("content", [b"not a database" * 100, b"SQLite format 3\x00" + b"\xff" * 4000])
def test_files_that_are_no_store(tmp_path, content):
    path = tmp_path / "x.db"
    path.write_bytes(content)
    refused("x.db", TraceStore, path)
    assert path.read_bytes() == content
    path.write_bytes(b"")
    TraceStore(path).close()


@pytest.mark.parametrize(
    "options", [{"durability": "x"}, {"fraction": 2}, {"queue_size": 0}, {"prompts": "x"}, {"on_full": "x"}]
)
def test_unknown_options(tmp_path, options):
    refused(next(iter(options)), TraceStore, tmp_path / "t.db", **options)


def test_a_forked_process_writes_for_itself(store):
    store.put(trace("parent"))
    store.flush()
    child = os.fork()
    if child == 0:
        try:
            store.put(trace("child"))
            store.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    store.put(trace("later"))
    assert [row.request_id for row in store.ls()] == ["parent", "child", "later"]


LEAVES = """
import sys, numpy as np
from dlm.trace import TraceStore, from_map
store = TraceStore(sys.argv[1])
for i in range(50):
    store.put(from_map(str(i), np.arange(40), np.arange(40), None))
if sys.argv[2] == "forgotten":
    del store
if sys.argv[2] == "error":
    raise SystemExit("stopped")
assert "torch" not in sys.modules and "pydantic" not in sys.modules
"""


@pytest.mark.parametrize("way", ["end", "forgotten", "error"])
def test_leaving_python_flushes(tmp_path, way):
    subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path / "t.db"), way], capture_output=True)
    with TraceStore(tmp_path / "t.db", create=False) as store:
        assert len(store) == 50
