"""The compiled kernels on a GPU: forward error against fp64, and results that know nothing of their company."""

from dataclasses import replace

import pytest
import torch

from dlm.kernels import Spans, dispatch, reference
from tests.kernels import draw

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="Triton is not installed: pip install 'dlm[gpu]'")

ERROR = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value
DTYPES = pytest.mark.parametrize("dtype", ERROR, ids=str)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double().cpu() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def large(seed: int, head_dim: int) -> draw.Attention:
    shape = {"head_dims": (head_dim,), "page_sizes": (16, 32, 64), "groups": (1, 2, 4, 7, 8)}
    return draw.attention(seed, longest=1500, most_queries=70, **shape)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention(dtype, head_dim, record_property):
    from dlm.kernels import attention

    worst = 0.0
    for seed in range(8):
        case = large(seed, head_dim).to(dtype)
        exact = reference.paged_attention(*case.to(torch.float64).arguments)
        there = case.to(dtype, "cuda")
        whole, split = (attention.paged_attention(*there.arguments, split=split) for split in (False, True))
        assert torch.equal(whole, split), "one program a chunk, or all chunks in one: the same bits"
        assert torch.equal(whole, dispatch.paged_attention(*there.arguments))
        if exact.numel() and exact.any():
            worst = max(worst, error(whole, exact))
    print(f"paged_attention {dtype} head {head_dim}: forward error {worst:.2e}")
    record_property("forward_error", worst)
    assert worst < ERROR[dtype]


@DTYPES
def test_a_span_gives_the_same_bits_alone_and_in_a_crowd(dtype):
    for seed in range(6):
        crowd = large(seed, 128).to(dtype, "cuda")
        q, k_pages, v_pages, spans, block_length, scale = crowd.arguments
        whole, starts = dispatch.paged_attention(*crowd.arguments), spans.starts.tolist()
        for i in range(len(spans)):
            rows, one = slice(starts[i], starts[i + 1]), slice(i, i + 1)
            facts = {"starts": spans.starts[i : i + 2] - spans.starts[i], "positions": spans.positions[rows]}
            facts |= {"max_queries": starts[i + 1] - starts[i], "max_visible": int(spans.visible[i])}
            facts |= {"block_lengths": None if spans.block_lengths is None else spans.block_lengths[one]}
            alone = Spans(visible=spans.visible[one], tables=spans.tables[one], **facts)
            found = dispatch.paged_attention(q[rows], k_pages, v_pages, alone, block_length, scale)
            assert torch.equal(found, whole[rows])


def test_a_full_gpu_and_an_empty_one_give_the_same_bits():
    generator = torch.Generator("cuda").manual_seed(0)
    b, g, pages = 64, 32, 128
    k, v = (torch.randn(pages, 32, g, 128, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(b * 32, g, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    many = Spans.of([range(4064, 4096)] * b, [4096] * b, [range(pages)] * b, "cuda")
    one = Spans.of([range(4064, 4096)], [4096], [range(pages)], "cuda")
    whole = dispatch.paged_attention(q, k, v, many, None)
    for i in (0, 17, 63):
        rows = slice(32 * i, 32 * i + 32)
        assert torch.equal(dispatch.paged_attention(q[rows], k, v, one, None), whole[rows])


@DTYPES
def test_rotation_and_write(dtype):
    for seed in range(20):
        case = draw.writing(seed, head_dims=(64, 80, 128)).to(dtype)
        ours, twins = case.to(dtype, "cuda").arguments, case.arguments
        found, twin = dispatch.rope_write(*ours), reference.rope_write(*twins)
        for a, b in zip((found, ours[5], ours[6]), (twin, twins[5], twins[6]), strict=True):
            assert torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0)), "the same bits"


@DTYPES
@pytest.mark.parametrize("width", [128, 2560, 4096, 8192])
def test_norm(dtype, width, record_property):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((300, width), (300, width), (width,)))
    normed, total = dispatch.rms_norm(x.cuda(), weight.cuda(), 1e-6, residual.cuda())
    assert torch.equal(total.cpu(), x + residual)
    exact, _ = reference.rms_norm((x + residual).double(), weight.double(), 1e-6)
    record_property("forward_error", error(normed, exact))
    assert error(normed, exact) < ERROR[dtype]
    few, _ = dispatch.rms_norm(x[:3].cuda(), weight.cuda(), 1e-6, residual[:3].cuda())
    assert torch.equal(few, normed[:3])


@DTYPES
@pytest.mark.parametrize("v", [4097, 126464])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_confidence(dtype, v, temperature, record_property):
    mask_id, n = v - 128, 64
    x, where = draw.logits(3, n, v, mask_id).to(dtype), draw.address(3, n)
    there = {key: value.cuda() for key, value in where.items()}
    options = {"mask_id": mask_id, "keep_mask": True, "temperature": temperature}
    found, twin = dispatch.confidence(x.cuda(), **options, **there), reference.confidence(x, **options, **where)
    assert found.finite.all() and torch.equal(found.first_token.cpu(), twin.first_token)
    same = found.token.cpu() == twin.token  # two libraries' logarithms may part at a near tie
    assert same.all() if temperature == 0 else same.float().mean() > 0.98
    worst = max(error(getattr(found, key), getattr(twin, key).double()) for key in ("first", "second", "entropy"))
    record_property("forward_error", worst)
    assert worst < 1e-5
    few = dispatch.confidence(x[5:8].cuda(), **options, **{key: value[5:8] for key, value in there.items()})
    for key, value in vars(few).items():
        assert torch.equal(value, vars(found)[key][5:8]), "the same bits in any company"


def test_a_step_can_be_captured_in_a_graph():
    case = replace(large(3, 128), block_length=None)
    assert case.q.numel() and any(limit for span in case.limits() for limit in span), "a draw with rows that see keys"
    case = case.to(torch.bfloat16, "cuda")
    logits = torch.randn(8, 5000, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return dispatch.paged_attention(*case.arguments), dispatch.confidence(logits, mask_id=7).token

    before = step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    case.q.neg_(), logits.neg_()
    graph.replay()
    for a, b, old in zip(captured, step(), before, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, old)
