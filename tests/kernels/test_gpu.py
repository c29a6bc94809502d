"""The compiled kernels on a GPU: forward error against fp64, and results that know nothing of their company."""

from dataclasses import replace

import pytest
import torch

from dlm.kernels import Spans, dispatch, reference
from dlm.kernels.routing import Routing
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
def test_norm_rotation_and_write(dtype):
    for seed in range(10):
        case = draw.writing(seed, head_dims=(64, 80, 128)).to(dtype)
        norms = torch.rand(2, case.q.shape[2]).to(dtype) + 0.5
        ours, twins = case.to(dtype, "cuda").arguments, case.to(torch.float64).arguments
        found = dispatch.rope_write(*ours, *norms.cuda(), 1e-6)
        twin = reference.rope_write(*twins, *norms.double(), 1e-6)
        assert error(found, twin) < ERROR[dtype]
        assert torch.equal(ours[6].cpu().isnan(), twins[6].isnan())
        kept = ~twins[5].isnan()
        assert not kept.any() or error(ours[5].cpu()[kept], twins[5][kept]) < ERROR[dtype]


@DTYPES
def test_gates(dtype):
    wide = torch.randn(70, 2 * 3000).to(dtype)
    assert error(dispatch.gated(wide.cuda()), reference.gated(wide.double())) < ERROR[dtype]
    x, weight = torch.randn(64, 1000).to(dtype), (torch.randn(2 * 700, 1000) / 32).to(dtype)
    found = dispatch.gated_product(x.cuda(), weight.cuda())
    assert error(found, reference.gated_product(x.double(), weight.double())) < 2 * ERROR[dtype]
    assert torch.equal(dispatch.gated_product(x[40:43].cuda(), weight.cuda()), found[40:43]), (
        "the same bits in any company"
    )


@DTYPES
@pytest.mark.parametrize("n", [1, 32, 700])
def test_mixture(dtype, n):
    routing = Routing(chosen=8, sigmoid=True, normalised=True, factor=2.5, groups=8, kept_groups=4)
    x, router, bias = torch.randn(n, 256).to(dtype), (torch.randn(64, 256) / 16).to(dtype), torch.randn(64) / 10
    gate_up, down = ((torch.randn(64, a, b) / b**0.5).to(dtype) for a, b in ((192, 256), (256, 96)))
    chosen, weights = dispatch.route(x.cuda(), router.cuda(), bias.cuda(), routing)
    expected, _ = reference.route(x, router, bias, routing)
    assert (chosen.cpu().sort(-1).values == expected.sort(-1).values).all(-1).float().mean() > 0.98  # but for near ties
    found = dispatch.mixture(x.cuda(), chosen, weights, gate_up.cuda(), down.cuda())
    wide = (y.double() for y in (gate_up, down))
    assert error(found, reference.mixture(x.double(), chosen.cpu().long(), weights.cpu(), *wide)) < 2 * ERROR[dtype]
    few = dispatch.mixture(x[-1:].cuda(), chosen[-1:], weights[-1:], gate_up.cuda(), down.cuda())
    assert torch.equal(few, found[-1:]), "the same bits in any company"


def test_one_long_request_among_short_ones_is_cut_and_gives_the_same_bits():
    g, lengths = 8, [16384, *[512] * 63]
    pages = iter(torch.randperm(sum(lengths) // 32).tolist())
    tables = [[next(pages) for _ in range(length // 32)] for length in lengths]
    k, v = (torch.randn(sum(lengths) // 32, 32, g, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(64 * 4, 4 * g, 128, device="cuda", dtype=torch.bfloat16)
    spans = Spans.of([range(length - 4, length) for length in lengths], lengths, tables, "cuda")
    found = dispatch.paged_attention(q, k, v, spans, None)
    (ends,) = spans.dealt.values()
    assert ends[1, 0] > 0 and ends[1, -1] == ends[1, 0], "the long one, and no other"
    from dlm.kernels import attention

    assert torch.equal(attention.paged_attention(q, k, v, replace(spans), None, split=False), found)


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
