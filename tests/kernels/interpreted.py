"""The kernels against their twins under Triton's interpreter. Run by test_interpreter.py in a process of its own:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted.py tests/kernels/interpreted_experts.py

The switch is read when a kernel is defined, so it cannot share a process with tests that compile. fp32 and fp16: the
interpreter's products of bf16 are wrong without a word.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import dlm
from dlm.diffusion import rng
from dlm.kernels import Spans, attention, chips, dealing, dispatch, paths, pick, reference, rope
from tests.inference.tiny import tiny_lm
from tests.kernels import draw

assert os.environ.get("TRITON_INTERPRET") == "1" and paths.INTERPRETED
CASES = int(os.environ.get("DLM_KERNEL_CASES", "6"))
DTYPES = (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3}
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # -inf less -inf, where not taken


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes loop bounds of arrays of one element by int(), which numpy 2.4 no longer takes."""
    patch = interpreter._patch_lang_tensor

    def with_bounds(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_bounds)


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose every row is summed in one order: some of numpy's BLAS kernels (Haswell's, Zen's) sum a tile's
    last rows in another, so that a row's bits would tell its place."""

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.einsum("...mk,...kn->...mn", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and chunks so small that tiny shapes have several."""
    monkeypatch.setattr(dealing, "CHUNK", 16)
    monkeypatch.setattr(dealing, "FINE", 2)
    monkeypatch.setattr(dealing, "COMBINED", 8)
    monkeypatch.setattr(attention, "AHEAD", 2)
    monkeypatch.setattr(attention, "tile_of", lambda *_: chips.Tile(16, 16, 4))
    monkeypatch.setattr(pick, "CHUNK", 64)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(CASES))
def test_attention(seed):
    dtype = DTYPES[seed % 2]
    case = draw.attention(seed, longest=60, most_queries=6).to(dtype)
    twin = reference.paged_attention(*case.arguments)
    whole, split = (attention.paged_attention(*case.arguments, split=split) for split in (False, True))
    torch.testing.assert_close(whole, twin, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(whole, split), "one program a chunk, or all chunks in one: the same bits"


def cut(spans: Spans) -> list[bool]:
    """Of each span, whether the latest launch cut it."""
    chunks = list(spans.dealt.values())[-1][1].tolist()
    return [a != b for a, b in zip([0, *chunks], chunks, strict=False)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("block_length", [None, 4])
def test_only_the_longest_of_many_is_cut(block_length, monkeypatch):
    monkeypatch.setattr(chips.Chip, "of", lambda _: chips.Chip(4, 65536, 0))
    lengths = [20, 9, 200, 31]
    k, v = torch.randn(2, 70, 4, 1, 8).unbind()
    tables = torch.randperm(70)[:66].split([5, 3, 50, 8])
    positions = [range(max(0, n - 6), n) for n in lengths]
    spans = Spans.of(positions, lengths, [t.tolist() for t in tables])
    q = torch.randn(int(spans.starts[-1]), 2, 8)
    found = attention.paged_attention(q, k, v, spans, block_length)
    assert cut(spans) == [False, False, True, False]
    torch.testing.assert_close(found, reference.paged_attention(q, k, v, spans, block_length), atol=2e-6, rtol=2e-6)
    plain = replace(spans)
    assert torch.equal(attention.paged_attention(q, k, v, plain, block_length, split=False), found)
    assert cut(plain) == [False] * 4
    crowd = Spans.of(positions * 5, lengths * 5, [t.tolist() for t in tables] * 5)
    assert torch.equal(attention.paged_attention(q.repeat(5, 1, 1), k, v, crowd, block_length)[: len(q)], found)
    assert not any(cut(crowd)), "five long ones keep all busy"


@pytest.mark.parametrize("fine", [2, 16])
def test_chunks_begin_where_they_end_and_are_counted(fine, monkeypatch):
    """The three formulas that programs find chunks by say the same."""
    monkeypatch.setattr(dealing, "CHUNK", 8)
    monkeypatch.setattr(dealing, "FINE", fine)
    begins, at = [], 0
    while at < 3000:
        begins.append(at)
        at += 8 * max(1, 2 ** (at // (8 * fine)).bit_length() if at >= 8 * fine else 1)
    keys = torch.tensor([*range(1, 700), 1024, 1025, 2999])
    expected = torch.tensor([sum(begin < key for begin in begins) for key in keys.tolist()])
    assert [dealing.chunks_in(key) for key in keys.tolist()] == expected.tolist()
    found = torch.empty(3, 1024, dtype=torch.int32)
    formulas[(1,)](found, torch.nn.functional.pad(keys, (0, 1024 - len(keys))).int(), len(begins), 8, fine, 12)
    assert found[0, : len(keys)].tolist() == expected.tolist()
    assert found[1, : len(begins)].tolist() == begins
    assert found[2, : len(begins) - 1].tolist() == begins[1:]


@triton.jit
def formulas(out, keys, count, CHUNK: tl.constexpr, FINE: tl.constexpr, OCTAVES: tl.constexpr):
    at = tl.arange(0, 1024)
    tl.store(out + at, dealing.chunks_of(tl.load(keys + at), CHUNK, FINE, OCTAVES))
    begin = dealing.begin_of(tl.minimum(at, count - 1), CHUNK, FINE)
    tl.store(out + 1024 + at, begin)
    tl.store(out + 2048 + at, dealing.end_after(begin, CHUNK, FINE, OCTAVES))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(CASES))
def test_padding_changes_no_bit(seed):
    """As recorded steps pad: spans without rows, rows of no span, wider tables, larger maxima."""
    case = draw.attention(seed, longest=60, most_queries=6)
    spans, plain = case.spans, attention.paged_attention(*case.arguments)
    n, b, width = len(spans.positions), len(spans), spans.tables.shape[1]
    more = torch.nn.functional.pad
    padded = Spans(
        starts=torch.cat((spans.starts, spans.starts[-1:].expand(3))),
        positions=more(spans.positions, (0, 5)),
        visible=more(spans.visible, (0, 3)),
        tables=more(spans.tables, (0, 4, 0, 3)),
        block_lengths=None if spans.block_lengths is None else more(spans.block_lengths, (0, 3)),
        max_queries=2 * spans.max_queries + 1,
        max_visible=(width + 4) * case.k_pages.shape[1],
    )
    q = torch.cat((case.q, torch.full((5, *case.q.shape[1:]), float("nan"))))
    for split in (False, True):
        found = attention.paged_attention(q, *case.arguments[1:3], padded, *case.arguments[4:], split=split)
        assert torch.equal(found[:n], plain) and len(padded) == b + 3


def test_attention_at_full_size():
    case = draw.attention(11, head_dims=(80,), page_sizes=(16,), longest=300, most_queries=3, groups=(2,))
    assert case.spans.max_visible > dealing.CHUNK
    found, twin = dispatch.paged_attention(*case.arguments), reference.paged_attention(*case.arguments)
    torch.testing.assert_close(found, twin, atol=2e-6, rtol=2e-6)


def test_an_unseen_slot_is_never_read_into_a_result():
    case = draw.attention(3)
    before = dispatch.paged_attention(*case.arguments)
    for pages in (case.k_pages, case.v_pages):
        pages[pages.isnan()] = float("inf")
    assert before.isfinite().all() and torch.equal(dispatch.paged_attention(*case.arguments), before)


@pytest.mark.parametrize("seed", range(CASES))
def test_rotation_and_write(seed):
    case = draw.writing(seed).to(DTYPES[seed % 2])
    ours, twins = case.arguments, case.arguments
    found, twin = rope.rope_write(*ours), reference.rope_write(*twins)
    for a, b in zip((found, ours[5], ours[6]), (twin, twins[5], twins[6]), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), "the same bits"


@pytest.mark.parametrize("seed", range(CASES))
def test_norm_rotation_and_write(seed):
    dtype = DTYPES[seed % 2]
    case = draw.writing(seed).to(dtype)
    norms = (*torch.randn(2, case.q.shape[2], generator=torch.Generator().manual_seed(seed)).to(dtype), 1e-5)
    ours, twins = case.arguments, case.arguments
    found, twin = rope.rope_write(*ours, *norms), reference.rope_write(*twins, *norms)
    assert torch.equal(ours[6].nan_to_num(7.0), twins[6].nan_to_num(7.0)), "values are as they were"
    for a, b in ((found, twin), (ours[5], twins[5])):
        torch.testing.assert_close(a, b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)
        assert dtype == torch.float32 or (a.nan_to_num(7.0) == b.nan_to_num(7.0)).float().mean() > 0.97, (
            "rounded where it is"
        )
    few = case.arguments
    last = rope.rope_write(*(None if x is None else x[-1:] for x in few[:5]), *few[5:7], few[7][-1:], *norms)
    assert torch.equal(last, found[-1:])


@pytest.mark.parametrize(("n", "d", "added"), [(1, 5, False), (700, 20, True), (30, 64, False), (2, 2500, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(n, d, added, dtype):
    generator = torch.Generator().manual_seed(n)
    x, residual = (torch.randn(n, d + 3, generator=generator).to(dtype)[:, :d] for _ in range(2))
    weight = torch.randn(d, generator=generator)  # fp32 beside fp16 too
    normed, total = dispatch.rms_norm(x, weight, 1e-5, residual if added else None)
    twin, twin_total = reference.rms_norm(x, weight, 1e-5, residual if added else None)
    assert torch.equal(total, twin_total) and normed.dtype == twin.dtype
    torch.testing.assert_close(normed, twin, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if dtype == torch.float16 and n * d > 1000:  # the norm is of the rounded sum, or a third would differ
        assert (normed == twin).float().mean() > 0.97


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(CASES))
def test_confidence(seed):
    v, temperature = ((41, 150, 64)[seed % 3], (0.0, 0.7, 0.0, 1e-6)[seed % 4])
    mask_id, keep_mask = ((37, True), (37, False), (0, True), (None, True))[seed // 2 % 4]
    x, where = draw.logits(seed, 8, v, mask_id), draw.address(seed, 8)
    x[6, 2], x[7, v - 1] = float("nan"), float("inf")
    found, twin = (
        room.confidence(x, mask_id=mask_id, keep_mask=keep_mask, temperature=temperature, **where)
        for room in (pick, reference)
    )
    assert found.finite.tolist() == twin.finite.tolist() == [True] * 6 + [False] * 2
    for key in ("token", "first_token"):
        assert torch.equal(getattr(found, key)[:6], getattr(twin, key)[:6]), key
    for key in ("p", "first", "second", "entropy"):
        torch.testing.assert_close(getattr(found, key)[:6], getattr(twin, key)[:6], atol=2e-6, rtol=1e-5)
    assert ((found.token >= 0) & (found.token < v)).all()  # of broken rows too: safe to look up


@pytest.mark.usefixtures("small")
def test_confidence_where_nothing_is_left_to_choose():
    x = torch.full((2, 130), float("-inf"))
    x[:, 70] = 1.0
    found = dispatch.confidence(x, mask_id=70, keep_mask=True)
    assert not found.finite.any()
    assert dispatch.confidence(x, mask_id=71).token.tolist() == [70, 70]


@triton.jit
def noise_of(out, seed, sample, step, position, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    address = (tl.load(seed + row), tl.load(sample + row), tl.load(step + row), tl.load(position + row))
    noise = pick.gumbel(*address, tl.arange(0, WIDTH // 4), WIDTH)
    tl.store(out + row * WIDTH + tl.arange(0, WIDTH), noise)


def test_noise_has_the_addresses_of_the_diffusion_room():
    where, out = draw.address(4, 6), torch.empty(6, 256)
    noise_of[(6,)](out, *where.values(), 256)
    torch.testing.assert_close(out, rng.gumbel(**where, vocab_size=256), atol=1e-6, rtol=1e-6)


@triton.jit
def small_of(out, word, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out + at, pick.small(tl.load(word + at).to(tl.uint32)))


def test_words_become_numbers_as_through_double_precision():
    edges = [2**i + d for i in range(2, 32) for d in (-3, -2, -1, 0, 1, 2, 3)] + [2**32 - i for i in range(1, 200)]
    word = torch.tensor((edges + [2**25 + i for i in range(200)])[:512])
    out = torch.empty(512)
    small_of[(1,)](out, word, 512)
    assert torch.equal(out, ((word.double() + 0.5) / 2**32).float().clamp_max(1 - 2**-24))


def test_the_network_uses_the_norm_where_no_gradient_is_asked_for():
    lm = tiny_lm(qk_norm=True, head_dim=16)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        fused = lm.network(ids)
    torch.testing.assert_close(fused, lm.network(ids).detach(), atol=2e-5, rtol=1e-5)


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, "n_group": 4, "topk_group": 2}
MOE |= {"num_shared_experts": 1, "expert_bias": True, "first_k_dense": 1}
BLOCKS = {"attention": "block_causal", "block_length": 4, "qk_norm": True}
DECODED = {
    "llada2": {"model_type": "llada2_moe", **BLOCKS, "moe": MOE, "rotary_dim": 4},
    "sdar": {"model_type": "sdar", **BLOCKS},
    "Dream": {"model_type": "Dream", "shifted_logits": True, "qkv_bias": True},
}


@pytest.mark.parametrize("family", list(DECODED)[: 1 if CASES < 10 else None])
def test_an_engine_decodes_the_tokens_of_torch_together_and_alone(family):
    settings = {"gen_length": 4, "block_length": 4, "steps": 2}
    given = [[5, 6, 7], [8, 9]]

    def decoded(kernels: str, prompts: list[list[int]]) -> list[list[int]]:
        engine = dlm.Engine(tiny_lm(**DECODED[family]), num_pages=20, kernels=kernels)
        return [result.tokens for result in engine.generate(prompts, **settings)]

    together = decoded("triton", given)
    assert together == decoded("torch", given)
    assert decoded("triton", given[1:]) == together[1:]
