"""What other processes do to a store at the same moment: a second connection is to SQLite what a second process is."""

import sqlite3

import pytest

from dlm.trace import TraceStore, dictionaries, from_map, upkeep
from dlm.trace.connection import TABLES
from dlm.trace.dictionaries import GUARDS
from dlm.trace.facts import digest
from dlm.trace.reader import TraceReader
from dlm.trace.session import StoreError
from tests.refusals import refused
from tests.trace.conftest import PIECES
from tests.trace.stress import stress
from tests.trace.worker import known, made


def fill(store: TraceStore, start: int, count: int, secret: int = 0) -> None:
    for i in range(start, start + count):
        store.put(made(f"r{i}", i, secret))
    store.flush()


def right(store: TraceReader, start: int, count: int, secret: int = 0) -> None:
    for i in range(start, start + count):
        assert digest(store[f"r{i}"]) == digest(made(f"r{i}", i, secret))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.db"


def test_acknowledged_traces_outlive_their_dictionary(path):
    with TraceStore(path) as a, TraceStore(path) as b, TraceReader(path) as late:
        fill(a, 0, 120)
        assert a.train_dict() == 1
        fill(a, 120, 1)  # with dictionary 1, which its writer now knows
        b.gc(50)
        b.redact()  # all dictionaries go, and there are too few traces for another
        assert b.stats()["dictionaries"] == []
        fill(b, 200, 120, secret=1)
        assert b.train_dict() == 2  # not 1 again
        fill(a, 400, 20)
        for reader in (a, b, late):
            right(reader, 200, 120, secret=1)
            right(reader, 400, 20)
        assert b.fsck().ok


def test_a_writer_that_is_overtaken_encodes_again(path):
    with TraceStore(path) as a, TraceStore(path) as b:
        fill(a, 0, 120)
        a.train_dict()
        choose, calls = a._writer.dictionary, []

        def overtaken(database):
            chosen = choose(database)
            calls.append(chosen)
            if len(calls) == 1:
                b.redact()
                b.train_dict()
            return chosen

        a._writer.dictionary = overtaken
        fill(a, 200, 3, secret=7)
        assert calls[0].dict_id() == 1 and all(chosen.dict_id() > 1 for chosen in calls[1:]) and calls[1:]
        right(b, 200, 3, secret=7)
        assert not any(known(0, content) for (content,) in b.database.query("SELECT content FROM dictionaries"))


@pytest.mark.parametrize("kind", [TraceReader, TraceStore])
def test_a_reader_tells_models_apart_after_gc(path, kind):
    with TraceStore(path) as store:
        store.put(from_map("a", [1], [0], None, context={"model": "pico"}))
        store.flush()
        with kind(path) as reader:
            assert reader["a"].meta == {"model": "pico"} and len(reader.find(model="pico")) == 1
            store.gc(0)
            store.put(from_map("b", [1], [0], None, context={"model": "sudoku"}))
            store.flush()
            assert reader.find(model="pico") == [] and len(reader.find(model="sudoku")) == 1
            assert reader["b"].meta == {"model": "sudoku"}
            assert reader.ls()[0].context == 2  # a number that no other context had
        assert store.stats()["contexts"] == 1


def test_numbers_are_not_given_again_whichever_version_deletes(path):
    with TraceStore(path) as store:
        fill(store, 0, 120)
        store.train_dict()
        store.gc(0)
        store.redact()
        with sqlite3.connect(path) as old:  # as an older version of this program did it
            old.execute("DELETE FROM contexts WHERE context NOT IN (SELECT context FROM traces)")
            last = old.execute("INSERT INTO contexts (digest, facts) VALUES (x'01', x'02')").lastrowid
            assert last > 15  # there were fifteen
            with pytest.raises(sqlite3.IntegrityError, match="another dictionary had this number"):
                old.execute("INSERT INTO dictionaries VALUES (1, x'03', x'04')")
        old.close()
        fill(store, 0, 120)
        assert store.train_dict() == 2


def test_a_store_of_before_is_read_and_written(path):
    with sqlite3.connect(path) as old:
        old.execute("PRAGMA journal_mode = WAL")
        for statement in (*TABLES, "PRAGMA application_id = 1684827508", "PRAGMA user_version = 1"):
            old.execute(statement)
    old.close()
    with TraceStore(path) as store:
        fill(store, 0, 120)
        store.train_dict()
        store.recompress()
        before = store.database.query("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
        assert len(before) == len(TABLES)  # an older version finds what it knows
        store.redact(["r1"])
        right(store, 2, 118)
        assert store.fsck().ok


@pytest.mark.parametrize("broken", range(len(GUARDS) + 1))
def test_a_deletion_that_fails_leaves_everything_as_it_was(path, broken, monkeypatch):
    with TraceStore(path) as store:
        fill(store, 0, 120)
        store.train_dict()
        store.train_dict()
        statements = (*GUARDS[:broken], "CREATE nonsense", *GUARDS[broken:])
        monkeypatch.setattr(dictionaries, "GUARDS", statements)
        with pytest.raises(StoreError):
            store.gc(110)
        right(store, 0, 120)
        assert store.stats()["dictionaries"] == [1, 2] and store.fsck().ok
        monkeypatch.undo()
        assert store.gc(110) == 10


def in_the_middle(monkeypatch, store: TraceStore, act) -> None:
    """Act once, when the store has read a trace and has not written it yet."""
    decoded, acts = store.decoded, [act]

    def and_act(*stored):
        trace = decoded(*stored)
        if acts:
            acts.pop()()
        return trace

    monkeypatch.setattr(store, "decoded", and_act)


@pytest.mark.parametrize("work", ["recompress", "train_dict"])
def test_neither_traces_nor_a_dictionary_bring_back_prompts_that_go_meanwhile(path, monkeypatch, work):
    with TraceStore(path) as a, TraceStore(path) as b:
        fill(a, 0, 120)
        if work == "recompress":
            a.train_dict()
        in_the_middle(monkeypatch, a, b.redact)
        assert getattr(a, work)() == 1 or work == "recompress"
        assert all((trace.tokens[:16] == -2).all() for trace in b)
        assert not any(known(0, content) for (content,) in b.database.query("SELECT content FROM dictionaries"))
        assert b.fsck().ok and len(b) == 120


def test_recompress_replaces_only_what_it_read(path, monkeypatch):
    with TraceStore(path.with_name("other.db")) as lesson:
        fill(lesson, 0, 120)
        lesson.train_dict()
        dictionary = lesson.database.query("SELECT content FROM dictionaries")[0][0]
    with TraceStore(path, dictionary=False) as plain:
        fill(plain, 0, 5)
    with TraceStore(path, dictionary=dictionary) as a, TraceStore(path, dictionary=dictionary) as b:
        in_the_middle(monkeypatch, a, b.redact)
        assert a.recompress() == 0
        assert all((trace.tokens[:16] == -2).all() for trace in b)


def test_redact_takes_what_was_put_meanwhile_in_its_place(path, monkeypatch):
    with TraceStore(path) as a, TraceStore(path) as b:
        fill(a, 0, 3)
        decoded, calls = a.decoded, []

        def counted(stored):
            calls.append(stored.request_id)
            if len(calls) == 4:  # the three were looked at, and the first is being redacted
                b.put(made("r0", 1000, 5), overwrite=True).result()
                b.gc(2)
            return decoded(stored)

        monkeypatch.setattr(a, "decoded", counted)
        assert a.redact() == 2
        assert sorted(row.request_id for row in b.ls()) == ["r0", "r2"]
        assert b["r0"].own["seed"] == 1000 and all((trace.tokens[:16] == -2).all() for trace in b)


def test_traces_stored_during_a_redaction_keep_their_dictionary(path, monkeypatch):
    with TraceStore(path) as a, TraceStore(path) as b:
        fill(a, 0, 120)
        a.train_dict()
        a.recompress()
        choose = b._writer.dictionary
        old = a.dictionaries.to_write_with(a.database)
        replace = a.database.replace

        calls = []

        def and_put(changes, dictionary=None):
            done = replace(changes, dictionary)
            calls.append(len(changes))
            if len(calls) == 2:  # those that were to be redacted are, and so are all that have the dictionary
                fill(b, 500, 5)  # with the dictionary that is about to go
            return done

        monkeypatch.setattr(a.database, "replace", and_put)
        b._writer.dictionary = lambda database: old
        a.redact([f"r{i}" for i in range(5)])
        b._writer.dictionary = choose
        right(b, 5, 115)
        right(b, 500, 5)
        assert 1 not in b.stats()["dictionaries"] and b.fsck().ok


def test_what_is_read_is_from_one_moment(path, monkeypatch):
    """A record is not looked for in tables that another process has changed since it was read."""
    monkeypatch.setattr(upkeep, "READER", 0.05)
    with TraceStore(path) as a, TraceStore(path) as b, TraceReader(path) as reader:
        fill(a, 0, 120)
        a.train_dict()
        a.recompress()
        shared, acts = reader.database._shared, [lambda: b.gc(0)]

        def and_act(*arguments):
            if acts:
                acts.pop()()
            return shared(*arguments)

        monkeypatch.setattr(reader.database, "_shared", and_act)
        assert digest(reader["r7"]) == digest(made("r7", 7, 0))
        assert "r7" not in reader


def test_redact_says_when_a_reader_keeps_the_log(path, monkeypatch):
    monkeypatch.setattr(upkeep, "BUSY", 0.1)
    with TraceStore(path) as store:
        fill(store, 0, 5)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN")
        other.execute("SELECT * FROM traces").fetchone()
        refused("the log beside the file still holds", store.redact, error=StoreError)
        other.close()
        assert store.redact() == 5
        assert path.with_name("t.db-wal").stat().st_size == 0


def test_a_transaction_that_was_interrupted_takes_no_other_along_and_one_that_fails_keeps_nobody_waiting(path):
    def work(store: TraceStore) -> None:
        with store.database.transaction():
            store.database.sql.execute("DELETE FROM traces")
            raise ZeroDivisionError("by nothing")

    with TraceStore(path) as store:
        fill(store, 0, 3)
        store.database.sql.execute("BEGIN IMMEDIATE")
        store.database.sql.execute("DELETE FROM traces")
        store.add_pieces("tok", PIECES)
        with TraceReader(path) as other:
            assert other.pieces("tok") is not None and len(other) == 3
        refused("by nothing", work, store, error=ZeroDivisionError)
        assert not store.database.sql.in_transaction and len(store) == 3


@pytest.mark.parametrize("durability", ["trace", "group", "none"])
def test_no_process_merges_the_log_without_the_disks_word(path, durability):
    with TraceStore(path, durability) as store:
        assert store.database.query("PRAGMA synchronous") == [(1 if durability == "none" else 2,)]


def test_pairs_of_operations_from_two_processes(tmp_path):
    held = stress(tmp_path, pairs=30, seed=3)
    assert held.log == []
