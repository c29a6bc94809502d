"""The twins, against float64 numpy and against the functions whose numbers they must give bit for bit."""

import numpy as np
import pytest
import torch

from dlm.diffusion.choose import Address, choose
from dlm.kernels import Spans, paged_attention, reference, rms_norm, rope_write
from dlm.models.attention import RMSNorm, rotate
from tests.kernels import draw, oracle


@pytest.mark.parametrize("seed", range(40))
def test_attention_is_the_softmax_over_the_keys_each_row_sees(seed):
    case = draw.attention(seed)
    found = reference.paged_attention(*case.arguments)
    assert found.shape == case.q.shape and found.is_contiguous()
    np.testing.assert_allclose(found, oracle.attention(case), atol=2e-6)


def test_the_draws_hold_what_they_promise():
    cases = [draw.attention(seed) for seed in range(40)]
    visible = [x for case in cases for x in case.spans.visible.tolist()]
    counts = [x for case in cases for x in case.spans.starts.diff().tolist()]
    assert min(visible) == 0 and min(counts) == 0 and 1 in counts and max(counts) == 12
    assert any(case.spans.block_lengths is not None for case in cases)
    assert {case.block_length for case in cases} >= {None, 1, 4, 7, 32}
    assert {case.q.shape[1] // case.k_pages.shape[2] for case in cases} == {1, 2, 3, 4}
    assert any((case.spans.tables.diff() < 0).any() for case in cases)


def test_neighbouring_pages_and_scattered_ones_give_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((5, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8)))
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    moved_k, moved_v = torch.empty_like(k), torch.empty_like(v)
    moved_k[order], moved_v[order] = k, v
    rows = [range(17, 22)]
    near = paged_attention(q, k, v, Spans.of(rows, [22], [range(6)]), 4)
    far = paged_attention(q, moved_k, moved_v, Spans.of(rows, [22], [order.tolist()]), 4)
    assert torch.equal(near, far)


def test_a_span_gives_the_same_alone_and_in_a_crowd():
    crowd = draw.attention(5, most_queries=9)
    whole = reference.paged_attention(*crowd.arguments)
    starts, block_lengths = crowd.spans.starts.tolist(), crowd.spans.block_lengths
    for i in range(len(crowd.spans)):
        rows = slice(starts[i], starts[i + 1])
        own = None if block_lengths is None else block_lengths[i : i + 1].tolist()
        given = [crowd.spans.positions[rows].tolist()], [int(crowd.spans.visible[i])], [crowd.spans.tables[i].tolist()]
        alone = Spans.of(*given, block_lengths=own)
        q, k_pages, v_pages, _, block_length, scale = crowd.arguments
        found = reference.paged_attention(q[rows], k_pages, v_pages, alone, block_length, scale)
        assert torch.equal(found, whole[rows])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_write(seed, dtype):
    case = draw.writing(seed).to(dtype)
    arguments = case.arguments
    found, k_pages, v_pages = rope_write(*arguments), arguments[5], arguments[6]
    q, k = case.q, case.k
    if case.cos is not None and case.sin is not None:
        q, k = (rotate(x[None], case.cos[None, :, None], case.sin[None, :, None])[0] for x in (case.q, case.k))
        if dtype == torch.float32:
            np.testing.assert_allclose(found, oracle.rotate(case.q, case.cos, case.sin), atol=1e-6)
    assert torch.equal(found, q)
    written = {int(slot): row for row, slot in enumerate(case.slots) if slot >= 0}
    for slot, (key, value) in enumerate(zip(k_pages.flatten(0, 1), v_pages.flatten(0, 1), strict=True)):
        if slot in written:
            assert torch.equal(key, k[written[slot]]) and torch.equal(value, case.v[written[slot]])
        else:
            assert key.isnan().all() and value.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True])
def test_norm(dtype, added):
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(6, 20, generator=generator).to(dtype) for _ in range(2))
    module = RMSNorm(20, 1e-5).to(dtype)
    torch.nn.init.normal_(module.weight, generator=generator)
    normed, total = rms_norm(x, module.weight.detach(), 1e-5, residual if added else None)
    assert torch.equal(total, x + residual if added else x)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(normed, module(total).detach(), atol=tolerance, rtol=tolerance)
    exact = oracle.rms_norm(total, module.weight.detach(), 1e-5)
    np.testing.assert_allclose(normed.float(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mask_id", [None, 3])
@pytest.mark.parametrize("keep_mask", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_confidence(mask_id, keep_mask, temperature):
    x, where = draw.logits(2, 9, 41, mask_id), draw.address(2, 9)
    found = reference.confidence(x, mask_id=mask_id, keep_mask=keep_mask, temperature=temperature, **where)
    exact = oracle.confidence(x, mask_id, keep_mask, temperature)
    assert found.finite.all()
    np.testing.assert_array_equal(found.first_token, exact["first_token"])
    for key in ("first", "second", "entropy"):
        np.testing.assert_allclose(getattr(found, key), exact[key], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.p, exact["probabilities"][np.arange(9), found.token], rtol=1e-5, atol=1e-7)
    if mask_id is not None:
        assert (found.token != mask_id).all() and (found.first_token != mask_id).all()
        if not keep_mask:
            x[:, mask_id] = float("-inf")
    signals = choose(x, mask_id=mask_id, temperature=temperature, address=Address(**where))
    assert torch.equal(found.token, signals.token)
    assert torch.equal(found.p, signals.confidence) and torch.equal(found.entropy, signals.entropy)
    assert torch.equal(found.first, signals.top[0][:, 0]) and torch.equal(found.second, signals.top[0][:, 1])


def test_a_vocabulary_of_one():
    found = reference.confidence(torch.tensor([[2.0]]), mask_id=None)
    assert (found.token.item(), found.first.item(), found.second.item(), found.entropy.item()) == (0, 1.0, 0.0, 0.0)


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
