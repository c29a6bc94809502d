"""The table of a forward, built from lists and read back on the host."""

import torch

from dlm.kernels import Spans


def test_spans_of_lists():
    spans = Spans.of([[3, 5, 6], [], [0]], [7, 2, 0], [[4, 1], [2], []])
    assert len(spans) == 3 and (spans.max_queries, spans.max_visible) == (3, 7)
    assert spans.starts.tolist() == [0, 3, 3, 4] and spans.positions.tolist() == [3, 5, 6, 0]
    assert spans.tables.shape == (3, 2) and spans.tables[0].tolist() == [4, 1]
    assert {x.dtype for x in (spans.starts, spans.positions, spans.visible, spans.tables)} == {torch.int32}


def test_no_spans_at_all():
    spans = Spans.of([], [], [])
    assert len(spans) == 0 and spans.starts.tolist() == [0] and spans.reads(None, 4) == []


def test_reads_leave_out_spans_with_nothing_to_do_and_are_made_once():
    spans = Spans.of([[3, 5], [], [0]], [7, 2, 0], [[4, 5], [2], []])
    (read,) = spans.reads(None, 4)
    assert (read.rows, read.seen, read.pages, read.mask) == (slice(0, 2), 7, slice(4, 6), None)
    assert spans.reads(None, 4) is spans.reads(None, 4)


def test_reads_end_where_no_row_sees_further():
    spans = Spans.of([[3, 5]], [16], [[9, 2, 7, 4]])
    (causal,) = spans.reads(1, 4)
    assert causal.seen == 6 and causal.pages.tolist() == [9, 2] and causal.mask.sum(-1).tolist() == [4, 6]
    (blocks,) = spans.reads(8, 4)
    assert blocks.seen == 8 and blocks.mask is None


def test_each_span_may_have_a_block_length_of_its_own():
    spans = Spans.of([[1], [1]], [8, 8], [[0, 1], [2, 3]], block_lengths=[0, 2])
    assert [read.seen for read in spans.reads(None, 4)] == [8, 2]
