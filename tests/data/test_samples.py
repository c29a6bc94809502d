"""Packing against brute force: nothing lost, nothing twice, every order addressed by seed and epoch."""

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm.data.documents import Document
from dlm.data.samples import FixedPacker, RowPacker
from dlm.data.table import TableStream, TokenTable, mix
from tests.refusals import refused

from .conftest import take

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)
END = 7


def documents(lengths: list[int]) -> list[Document]:
    """Documents that count upwards, so that every token is different."""
    ends = np.cumsum(lengths)
    return [Document(np.arange(e - n, e, dtype=np.int32)) for e, n in zip(ends, lengths, strict=True)]


@settings(max_examples=40)
@given(lengths=LENGTHS, length=st.integers(1, 6))
def test_fixed_packing_cuts_the_concatenation(lengths, length):
    packer = FixedPacker(length, END)
    cuts = []
    for document in documents(lengths):
        packer.push(document)
        while (cut := packer.pop()) is not None:
            cuts.append(cut.ids)
    total = sum(lengths)
    whole = np.arange(total // length * length, dtype=np.int32).reshape(-1, length)
    assert [c.tolist() for c in cuts] == whole.tolist()
    assert packer.rest.tolist() == list(range(whole.size, total))


@settings(max_examples=40)
@given(lengths=LENGTHS, length=st.integers(1, 6))
def test_row_packing_truncates_and_pads(lengths, length):
    packer = RowPacker(length, END)
    for document in documents(lengths):
        packer.push(document)
        row = packer.pop()
        assert row is not None
        assert row.ids.tolist() == (document.ids.tolist() + [END] * length)[:length]
        assert row.prompt is None
        assert packer.pop() is None


def test_row_packing_of_a_prompt_mask_and_an_order():
    packer = RowPacker(4, END)
    packer.push(Document(np.array([1, 2], np.int32), np.array([True, False]), np.array([-1, 3], np.int32)))
    row = packer.pop()
    assert row is not None and row.prompt is not None and row.order is not None
    assert (row.ids.tolist(), row.prompt.tolist()) == ([1, 2, END, END], [True, False, False, False])
    assert row.order.tolist() == [-1, 3, -1, -1]
    packer.push(Document(np.arange(5, dtype=np.int32), np.array([True] * 4 + [False])))
    assert packer.pop() is None


@settings(max_examples=40)
@given(lengths=LENGTHS, length=st.integers(1, 6), seed=st.integers(0, 3))
def test_an_epoch_of_cuts_is_a_turned_ring(lengths, length, seed):
    total = sum(lengths)
    table = TokenTable.of(documents(lengths), 300)
    if total < length:
        refused("not one sequence", TableStream, table, length, "fixed", END, seed, None)
        return
    stream = TableStream(table, length, "fixed", END, seed, None)
    for _ in range(3):
        cuts = [s["input_ids"] for s in take(stream, total // length)]
        for cut in cuts:
            assert (np.diff(cut) % total == 1 % total).all()
        assert max(Counter(np.concatenate(cuts).tolist()).values()) == 1
        starts = sorted(int(c[0]) for c in cuts)
        gaps = {(b - a) % total for a, b in pairwise(starts)}
        assert all(g % length in (0, total % length) for g in gaps)


@settings(max_examples=40)
@given(lengths=LENGTHS, seed=st.integers(0, 3))
def test_an_epoch_of_rows_has_every_document_once(lengths, seed):
    stream = TableStream(TokenTable.of(documents(lengths), 300), 9, "row", 999, seed, 2)
    rows = [tuple(s["input_ids"].tolist()) for s in stream]
    expected = [tuple((d.ids.tolist() + [999] * 9)[:9]) for d in documents(lengths)]
    assert sorted(rows[: len(lengths)]) == sorted(expected) == sorted(rows[len(lengths) :])


def test_epochs_and_seeds_differ_and_a_split_can_stay_unturned():
    table = TokenTable.of(documents([50, 50]), 300)
    orders = [
        [s["input_ids"].tolist() for s in take(TableStream(table, 5, "fixed", END, seed, None), 40)]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:20] != orders[0][20:]
    still = TableStream(table, 5, "fixed", END, 0, 1, rotate=False)
    assert sorted(s["input_ids"][0] for s in still) == list(range(0, 100, 5))


def test_samples_are_numbered_and_finite_streams_end():
    table = TokenTable.of(documents([20]), 300)
    assert [s["index"] for s in TableStream(table, 5, "fixed", END, 0, 2)] == list(range(8))


def test_wide_vocabularies_keep_their_ids():
    ids = np.array([5, 65_535, 65_536, 150_000], np.int32)
    assert TokenTable.of([Document(ids)], 150_001).ids.tolist() == ids.tolist()
    assert TokenTable.of([Document(ids[:2])], 65_536).ids.dtype == np.uint16


def test_mix_is_splitmix64():
    # The first outputs of the published generator for seed 0 (Vigna's splitmix64.c).
    golden = 0x9E3779B97F4A7C15
    values = mix(np.array([0, golden, 2 * golden % 2**64], np.uint64), 0)
    assert [hex(v) for v in values.tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
