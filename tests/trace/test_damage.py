import sqlite3
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from dlm.errors import UserError
from dlm.trace import TraceStore
from dlm.trace.facts import digest
from dlm.trace.session import StoreError
from tests.refusals import refused
from tests.trace.conftest import PIECES
from tests.trace.flips import flips
from tests.trace.worker import made

COUNT = 20


def varint(number: int) -> bytes:
    """As SQLite writes it: seven bits a byte, the highest first."""
    low, rest = number & 127, number >> 7
    return (varint(rest)[:-1] + bytes((varint(rest)[-1] | 128,)) if rest else b"") + bytes((low,))


@pytest.fixture
def disordered(tmp_path) -> Iterator[Path]:
    """A store whose last trace seems to come before the others, by one bit of its row's key."""
    path = tmp_path / "t.db"
    with TraceStore(path) as store:
        for i in range(COUNT):
            store.put(made(f"r{i}", i, 0))
        store.flush()
        last = store.ls()[-1].at
    content = path.read_bytes()
    assert content.count(varint(last)) == 1
    at = content.index(varint(last))
    highest = 1 << (content[at] & 127).bit_length() - 1  # set, whatever the time: without it the key is the lowest
    path.write_bytes(content[:at] + bytes((content[at] ^ highest,)) + content[at + 1 :])
    return path


def test_every_walk_through_a_disordered_store_ends(disordered, tmp_path):
    with TraceStore(disordered, create=False) as store:
        with pytest.raises(UserError, match="damaged"):
            for _ in islice(store, 10 * COUNT):
                pass
        for walk in (
            store.ls,
            lambda: store.ls(newest=5),
            lambda: store.find(model="m1"),
            lambda: store.export(str(tmp_path / "out")),
            store.redact,
            store.recompress,
            lambda: store.gc(5),
            lambda: store.gc("1h"),
        ):
            refused("damaged", walk)
        report = store.fsck()
        assert not report.ok and report.traces == COUNT - 1
        assert not any("fsck" in line for line in (*report.database, *report.damaged.values()))
        assert digest(store["r7"]) == digest(made("r7", 7, 0))


def test_rows_out_of_order_are_noticed_though_the_index_agrees(disordered):
    with TraceStore(disordered, create=False) as store:
        look = "SELECT at FROM traces INDEXED BY sqlite_autoindex_traces_1 WHERE id = 'r19'"
        ((last,),) = store.database.query(look)
    content, there = disordered.read_bytes(), last.to_bytes(6, "big")
    assert content.count(there) == 1
    lower = last ^ 1 << last.bit_length() - 1  # as in the row
    disordered.write_bytes(content.replace(there, lower.to_bytes(6, "big")))
    with TraceStore(disordered, create=False) as store:
        for walk in (store.ls, lambda: store.ls(newest=5)):
            refused("the order of its traces is damaged", walk)


def test_what_traces_share_is_checked_too(tmp_path):
    path = tmp_path / "t.db"
    with TraceStore(path) as store:
        store.add_pieces("tok", PIECES)
        for i in range(120):
            store.put(made(f"r{i}", i, 0))
        store.train_dict()
        assert store.fsck().ok
        with sqlite3.connect(path) as direct:
            direct.execute("UPDATE dictionaries SET content = x'00'")
            direct.execute("UPDATE pieces SET content = x'00'")
        direct.close()
    with TraceStore(path) as store:
        report = store.fsck()
        assert report.traces == 120 and report.database[0] == "dictionary 1 is damaged"
        assert report.database[1].endswith("the pieces of tokenizer tok are damaged")
        store.put(made("more", 1, 0)).result()  # without the dictionary, which would take it along
        assert digest(store["more"]) == digest(made("more", 1, 0))


def test_what_new_traces_share_with_old_ones_is_whole_again(tmp_path):
    path = tmp_path / "t.db"
    with TraceStore(path) as store:
        for i in range(120):
            store.put(made(f"r{i}", i, 0))
        store.train_dict()
        dictionary = store.database.query("SELECT content FROM dictionaries")[0][0]
        store.recompress()
    with sqlite3.connect(path) as direct:
        direct.execute("UPDATE contexts SET facts = x'00'")
        direct.execute("UPDATE dictionaries SET content = x'00'")
    direct.close()
    with TraceStore(path, dictionary=dictionary) as store:
        assert not store.fsck().ok
        for i in range(15):  # of every context
            store.put(made(f"more{i}", i, 0))
        store.flush()
        for i in range(15):
            assert digest(store[f"more{i}"]) == digest(made(f"more{i}", i, 0))
        assert store.fsck().ok and digest(store["r7"]) == digest(made("r7", 7, 0))


def test_an_id_that_is_no_text_any_more_harms_no_other(tmp_path):
    path = tmp_path / "t.db"
    with TraceStore(path) as store:
        for name in ("first", "the-second", "third"):
            store.put(made(name, 1, 0))
    content = path.read_bytes()
    assert content.count(b"the-second") == 2  # in its row, and in the index
    path.write_bytes(content.replace(b"the-second", b"the-sec\xe5nd"))
    with TraceStore(path) as store:
        report = store.fsck()
        assert report.traces == 2 and len(report.damaged) == 1 and not report.database


def test_errors_that_sqlite_words_in_broken_text(tmp_path):
    path = tmp_path / "t.db"
    TraceStore(path).close()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"tabletracestraces", b"tabletrac\xe5straces"))
    refused("malformed database schema", TraceStore, path, error=StoreError)


def test_flipped_bits(tmp_path):
    done = flips(tmp_path, count=120, seed=1)
    assert done.log == [] and done.longest < 5
