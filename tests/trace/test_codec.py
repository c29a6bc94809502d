import sys
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard

from dlm.errors import UserError
from dlm.trace import TraceStore, codec, columns, from_map
from dlm.trace.assemble import from_events
from dlm.trace.codec import CorruptTrace, content, decode, encode
from dlm.trace.events import NEVER, SET
from dlm.trace.facts import digest
from dlm.trace.trace import Trace
from tests.refusals import refused
from tests.trace.synthetic import anything, run


def again(trace: Trace, dictionary=None) -> Trace:
    return decode(encode(trace, dictionary), trace.request_id, trace.context, lambda number: dictionary)


def assert_same_states(trace: Trace, made) -> None:
    expected = made.padded()
    assert trace.num_steps == len(expected) - 1
    if expected.size <= 2**21:
        np.testing.assert_array_equal(trace.states(), expected)
    for k in {0, len(expected) // 2, len(expected) - 1}:
        np.testing.assert_array_equal(trace.state(k), expected[k])
        assert trace.length_at(k) == len(made.canvases[k])
    np.testing.assert_array_equal(trace.tokens, expected[-1])
    trace.check()


@pytest.mark.parametrize(
    ("count", "longest", "most_steps"), [(60, 600, 120), pytest.param(250, 4096, 1024, marks=pytest.mark.slow)]
)
def test_every_state_of_every_strategy(count, longest, most_steps):
    rng = np.random.default_rng(0)
    for i in range(count):
        made = anything(rng, longest, most_steps, name=f"trace {i}")
        assert_same_states(made.trace, made)
        assert_same_states(again(made.trace), made)


@pytest.mark.parametrize(("length", "steps"), [(1, 1), (4096, 1024), (1, 1024), (4096, 1), (0, 0), (7, 0)])
def test_corners(length, steps):
    made = run(np.random.default_rng(1), length, steps, edits=0.0005, remasks=0.0005)
    trace = again(made.trace)
    assert_same_states(trace, made)
    assert trace.meta == {}


@pytest.mark.parametrize("vocab", [5, 256, 257, 65_536, 65_537, 2**24 + 1, 2**30])
def test_all_widths_of_tokens(vocab):
    made = run(np.random.default_rng(2), 40, 7, vocab=vocab, remasks=0.1)
    for form in codec.FORMS:
        frame = zstandard.compress(content(made.trace, form))
        record = bytes((codec.FORMAT,)) + digest(made.trace) + frame
        assert_same_states(decode(record, "r"), made)


def test_what_stands_beside_the_tokens():
    made = run(np.random.default_rng(3), 60, 9, edits=0.1, drafts=0.4, keep=("confidence", "topk", "digests"))
    trace = again(made.trace)
    for name in ("confidence", "topk_tokens", "topk_logits", "accepted"):
        np.testing.assert_array_equal(getattr(trace, name), getattr(made.trace, name))
    assert trace.events() == made.trace.events()
    assert trace.digests == made.trace.digests and len(trace.digests) == 8 * 9


@pytest.mark.parametrize("positions", [columns.PACKED_LIMIT // 4 - 1, columns.PACKED_LIMIT // 4 + 1])
def test_more_top_k_tokens_than_are_packed(positions):
    rng = np.random.default_rng(9)
    rows = rng.integers(0, 9, (positions, 4)), rng.normal(size=(positions, 4))
    events = np.stack((np.zeros(positions), np.arange(positions), np.full(positions, SET), rows[0][:, 0])).astype(int)
    trace = from_events("x", np.full(positions, 9), events, mask_id=9, num_steps=1, topk=rows)
    np.testing.assert_array_equal(again(trace).topk_tokens, rows[0])


def test_every_flipped_bit_and_every_truncation_is_noticed():
    rng = np.random.default_rng(4)
    plain = run(rng, 48, 12, prompt=5, meta={"seed": 1})
    rich = run(rng, 24, 6, edits=0.1, drafts=0.3, keep=("confidence", "topk", "digests"))
    samples = [content(run(rng, 48, 12).trace, codec.WHOLE) for _ in range(300)]
    trained = zstandard.train_dictionary(4096, samples, dict_id=1)
    for made, dictionary in ((plain, None), (rich, None), (plain, trained)):
        record = encode(made.trace, dictionary)

        def read(data, dictionary=dictionary, made=made):
            try:
                trace = decode(data, "r", {}, lambda number: dictionary)
            except CorruptTrace:
                return 0
            np.testing.assert_array_equal(trace.states(), made.trace.states())
            assert trace.meta == made.trace.meta
            return 1

        assert read(record)
        flips = sum(
            read(record[:at] + bytes((record[at] ^ 1 << bit,)) + record[at + 1 :])
            for at in range(len(record))
            for bit in range(8)
        )
        assert flips < 0.01 * 8 * len(record)  # bits of zstd's header that say nothing
        assert sum(read(record[:size]) for size in range(len(record))) == 0
        assert read(record + b"x") == 0


def test_a_record_vouches_for_its_id_and_its_context():
    made = run(np.random.default_rng(5), 8, 2)
    made.trace.context = {"model": "pico"}
    record = encode(made.trace)
    assert decode(record, "r", {"model": "pico"}).meta["model"] == "pico"
    for name, context in (("s", {"model": "pico"}), ("r", {"model": "sudoku"}), ("r", {})):
        refused("not what was written", decode, record, name, context, error=CorruptTrace)


def fuzzed(rng: np.random.Generator):
    """Blobs: noise, valid frames of noise, and records with a few bytes changed inside the frame."""
    made = anything(rng, 200, 50)
    for _ in range(20):
        noise = rng.bytes(int(rng.integers(0, 400)))
        yield noise
        head = bytes((codec.FORMAT,)) + rng.bytes(16)
        yield head + noise
        yield head + zstandard.compress(noise)
        inner = bytearray(content(made.trace, int(rng.choice(codec.FORMS))))
        for _ in range(int(rng.integers(1, 6))):
            inner[int(rng.integers(len(inner))) if rng.random() < 0.5 else 0] = int(rng.integers(256))
        yield head + zstandard.compress(bytes(inner))
        counts = b"".join(bytes((int(rng.integers(256)) | 128,)) * int(rng.integers(0, 5)) + b"\x7f" for _ in range(8))
        yield head + zstandard.compress(bytes((int(rng.integers(256)),)) + counts + noise)


ACTS = ("exec", "compile", "import", "pickle.find_class", "marshal.loads", "os.system", "subprocess.Popen", "open")
"""Audit events of what a decoder that runs what it reads would do."""


@pytest.fixture
def acts() -> Iterator[list[str]]:
    """What of that happens during a test."""
    seen, on = [], [True]  # a hook stays for good, so it is switched off
    sys.addaudithook(lambda event, _: seen.append(event) if on and event in ACTS else None)
    yield seen
    on.clear()


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.slow)])  # of a hundred blobs
def test_arbitrary_bytes_give_an_error_take_no_room_and_run_nothing(count, acts):
    rng = np.random.default_rng(6)
    tracemalloc.start()
    try:
        for _ in range(count):
            for blob in fuzzed(rng):
                with pytest.raises(CorruptTrace):
                    decode(blob, "r")
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    assert acts == []


def test_a_frame_that_declares_too_much_is_not_unfolded():
    bomb = zstandard.compress(bytes(codec.MAX_CONTENT + 1))
    undeclared = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**25))
    for frame in (bomb, undeclared):
        refused("declares", decode, bytes((codec.FORMAT,)) + bytes(16) + frame, "r", error=CorruptTrace)


def test_what_does_not_fit_is_refused_when_written():
    trace = run(np.random.default_rng(7), 3, 1).trace
    trace.num_steps = codec.MAX_STEPS + 1
    refused("steps are more than a record holds", encode, trace)


def test_a_payload_is_near_the_entropy_bound():
    rng = np.random.default_rng(8)
    traces = []
    for i in range(20):
        steps, tokens = rng.permutation(np.repeat(np.arange(64), 2)), rng.integers(0, 32_000, 128)
        traces.append(from_map("12345678", tokens, steps, 1, num_steps=64, own={"seed": i}))
    assert np.mean([len(encode(trace)) for trace in traces]) <= 1.25 * 351  # uniform tokens: nothing to squeeze
    assert all(again(trace).first_step.max() < NEVER for trace in traces)


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
