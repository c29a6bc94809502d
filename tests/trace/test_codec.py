"""Records: what goes in comes out, step by step; what was altered does not come out at all."""

import sys
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard

from dlm.errors import UserError
from dlm.trace import codec, columns
from dlm.trace.assemble import from_events
from dlm.trace.codec import CorruptTrace, content, decode, encode
from dlm.trace.events import NEVER, SET
from dlm.trace.facts import digest
from dlm.trace.trace import Trace
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
        with pytest.raises(CorruptTrace, match="not what was written"):
            decode(record, name, context)


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
        with pytest.raises(CorruptTrace, match="declares"):
            decode(bytes((codec.FORMAT,)) + bytes(16) + frame, "r")


def test_what_does_not_fit_is_refused_when_written():
    trace = run(np.random.default_rng(7), 3, 1).trace
    trace.num_steps = codec.MAX_STEPS + 1
    with pytest.raises(UserError, match="steps are more than a record holds"):
        encode(trace)


def test_a_payload_is_near_the_entropy_bound():
    rng = np.random.default_rng(8)
    traces = [
        Trace(
            request_id="12345678",
            mask_id=MASK,
            num_steps=64,
            first_step=rng.permutation(np.repeat(np.arange(64, dtype=np.int32), 2)),
            first_token=rng.integers(0, 32_000, 128).astype(np.int32),
            own={"seed": i},
        )
        for i in range(20)
        for MASK in (1,)
    ]
    assert np.mean([len(encode(trace)) for trace in traces]) <= 1.25 * 351  # uniform tokens: nothing to squeeze
    assert all(again(trace).first_step.max() < NEVER for trace in traces)
