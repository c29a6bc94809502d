"""The C kernels on the cases of the others: against float64 numpy, and against the twins."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from dlm.kernels import Spans, reference
from dlm.kernels.c import binding, native, products, structs
from tests.kernels import draw, oracle

pytestmark = pytest.mark.skipif(binding.library()[0] is None, reason=binding.library()[1])


@pytest.fixture(autouse=True)
def _no_gradient():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("seed", range(60))
def test_attention_is_the_softmax_over_the_keys_each_row_sees(seed):
    case = draw.attention(seed) if seed < 40 else draw.attention(seed, longest=400, most_queries=70)
    found = native.paged_attention(*case.arguments)
    np.testing.assert_allclose(found, oracle.attention(case), atol=3e-6)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_at_full_size(head_dim):
    case = draw.attention(3, head_dims=(head_dim,), longest=500, most_queries=64, page_sizes=(32,))
    np.testing.assert_allclose(native.paged_attention(*case.arguments), oracle.attention(case), atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seed", "head_dim"), [(69, 64), (303, 10), (382, 24)])
def test_attention_of_more_rows_than_a_task_takes(seed, head_dim, dtype):
    case = draw.attention(seed, head_dims=(head_dim,), longest=150, most_queries=350, groups=(4,))
    assert case.spans.starts.tolist() == [0, 350]
    assert case.spans.visible[0] > 128  # 1,400 rows of a key head, which see more than two blocks of keys
    pages = {name: getattr(case, name).to(dtype) for name in ("k_pages", "v_pages")}
    found = native.paged_attention(*replace(case, **pages).arguments)
    rounded = replace(case, **{name: x.float() for name, x in pages.items()})
    np.testing.assert_allclose(found, oracle.attention(rounded), atol=3e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_row_gives_the_same_bits_alone_and_in_a_crowd(seed):
    case = draw.attention(seed, longest=300, most_queries=40)
    whole = native.paged_attention(*case.arguments)
    rows = torch.arange(0, len(case.q), 3)
    assert torch.equal(native.paged_attention(*case.arguments, rows=rows), whole[rows])
    for row in range(len(case.q)):
        assert torch.equal(native.paged_attention(*case.arguments, rows=torch.tensor([row]))[0], whole[row])


def test_no_number_of_threads_changes_a_bit():
    case = draw.attention(382, head_dims=(24,), longest=150, most_queries=350, groups=(4,))
    x = torch.randn(300, 70)
    weight = torch.randn(200, 70)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norm = native.rms_norm(x, torch.ones(70), 1e-5)[0]
            linear, gated = products.linear(product(weight), x), products.gated(product(weight), product(weight), x)
            seen, p = native.paged_attention(*case.arguments), native.confidence(x, mask_id=3).p
            found.append((norm, linear, gated, seen, p))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_scores_of_any_size_and_broken_ones_stay_in_their_row():
    q, pages = torch.randn(3, 2, 16) * 300, torch.randn(4, 8, 2, 16)
    q[1] = float("nan")
    spans = Spans.of([range(20, 23)], [25], [[2, 0, 3, 1]])
    found = native.paged_attention(q, pages, pages, spans, None)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[::2], reference.paged_attention(q, pages, pages, spans, None)[::2])


@pytest.mark.parametrize("seed", range(12))
def test_rotation_and_write(seed):
    case = draw.writing(seed)
    ours, theirs = case.arguments, case.arguments
    found, expected = native.rope_write(*ours), reference.rope_write(*theirs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for mine, other in zip(ours[5:7], theirs[5:7], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("width", [1, 20, 64, 256, 1000])
@pytest.mark.parametrize("added", [False, True])
def test_norm(width, added):
    x, residual, weight = torch.randn(6, width), torch.randn(6, width), torch.randn(width)
    normed, total = native.rms_norm(x, weight, 1e-5, residual if added else None)
    assert torch.equal(total, x + residual if added else x)
    np.testing.assert_allclose(normed, oracle.rms_norm(total, weight, 1e-5), rtol=2e-6, atol=1e-6)


def test_norm_of_heads_that_are_cut_from_a_wider_product():
    qkv = torch.randn(5, 7, 16)
    found = native.rms_norm(qkv[:, 2:5], torch.ones(16), 1e-5)[0]
    np.testing.assert_allclose(found, oracle.rms_norm(qkv[:, 2:5], torch.ones(16), 1e-5), rtol=2e-6, atol=1e-6)


def product(weight: torch.Tensor, bias=None, panels=None) -> products.Product:
    addresses = [None if x is None else x.data_ptr() for x in (weight, panels, bias)]
    return products.Product(*addresses, *weight.shape, weight.stride(0))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("inputs", [20, 512, 600])
@pytest.mark.parametrize("width", [1, 32, 40, 150])
def test_gated_products(width, inputs, biased):
    weights, x = torch.randn(2, width, inputs), torch.randn(30, inputs)
    biases, panels = torch.randn(2, width), [products.panels(w) for w in weights]
    x[1] *= 20  # far into both tails
    x[2, 0] = float("nan")
    added = biases.double() if biased else (0, 0)
    gate, up = (x.double() @ w.double().T + b for w, b in zip(weights, added, strict=True))
    exact = gate / (1 + (-gate).exp()) * up
    for copies in ((None, None), panels, (panels[0], None), (None, panels[1])):
        parts = [product(*part) for part in zip(weights, biases if biased else (None, None), copies, strict=True)]
        found = products.gated(*parts, x)
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=1e-3, equal_nan=True)
        assert torch.equal(products.gated(*parts, x[5:6])[0], found[5])


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("inputs", [1, 7, 16, 100, 512, 513, 704, 1500])
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 150])
def test_linear(inputs, outputs, copied):
    weight, bias = torch.randn(outputs, inputs + 3)[:, :inputs], torch.randn(outputs)
    panels = products.panels(weight) if copied else None
    for chosen in (None, bias):
        whole, alone = product(weight, chosen, panels), []
        for rows in (1, 5, 12, 13, 32, 70):
            x = torch.randn(rows, inputs)
            found = products.linear(whole, x)
            exact = x.double() @ weight.double().T + (0 if chosen is None else chosen.double())
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6 * inputs**0.5 * 4)
            alone += [torch.equal(products.linear(whole, x[i : i + 1])[0], found[i]) for i in range(rows)]
        assert all(alone)


def test_a_copy_of_a_weight_gives_the_bits_of_the_weight():
    weight, x = torch.randn(150, 700), torch.randn(20, 700)
    panels = products.panels(weight)
    assert torch.equal(products.linear(product(weight), x), products.linear(product(weight, None, panels), x))


@pytest.mark.parametrize("vocabulary", [15, 41, 1000, 4096])
@pytest.mark.parametrize("keep_mask", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_confidence(vocabulary, keep_mask, masked):
    mask_id = vocabulary // 5 if masked else None
    x = draw.logits(2, 9, vocabulary, mask_id)
    found = native.confidence(x, mask_id=mask_id, keep_mask=keep_mask)
    exact = oracle.confidence(x, mask_id, keep_mask, 0.0)
    assert found.finite.all()
    np.testing.assert_array_equal(found.token, exact["first_token"])
    for key in ("first", "second", "entropy"):
        np.testing.assert_allclose(getattr(found, key), exact[key], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("vocabulary", "mask_id"), [(1, None), (2, None), (2, 0), (2, 1), (17, 16)])
def test_small_vocabularies(vocabulary, mask_id):
    x = torch.randn(9, vocabulary)
    found, twin = native.confidence(x, mask_id=mask_id), reference.confidence(x, mask_id=mask_id)
    for key, value in vars(found).items():
        torch.testing.assert_close(value, getattr(twin, key), rtol=1e-5, atol=1e-6)


def test_what_is_far_below_the_best_underflows_to_nothing():
    found = native.confidence(torch.tensor([[200.0, 0.0, -50.0]]), mask_id=None)
    assert (found.first.item(), found.second.item()) == (1.0, 0.0)


@pytest.mark.parametrize("place", [0, 5, 9, 16, 37, 40])
def test_broken_rows_are_told_apart(place):
    x = torch.randn(6, 41)
    x[1, place], x[2, place], x[3] = float("nan"), float("inf"), float("-inf")
    x[4] = float("-inf")
    x[4, 9] = 1.0  # the mask alone is finite: nothing to choose
    x[5, place] = float("-inf")
    for room in (native, reference):
        found = room.confidence(x, mask_id=9, keep_mask=True)
        assert found.finite.tolist() == [True, False, False, False, False, True]


def test_equals_go_to_the_lowest_id():
    x = torch.zeros(40, 200)
    for row in range(40):
        x[row, [3 * row + 1, 3 * row + 17, 3 * row + 40]] = 2.0
    found = native.confidence(x, mask_id=None)
    assert found.token.tolist() == [3 * row + 1 for row in range(40)]
    assert torch.equal(found.first, found.second)


def test_narrower_vectors_give_the_same_numbers(tmp_path, monkeypatch):
    """What other CPUs would run; whether there is a compiler and where it keeps its work are settled as at first use."""
    case = draw.attention(2, longest=200, most_queries=20)
    x = draw.logits(2, 9, 1000, 3)
    expected = native.paged_attention(*case.arguments), native.confidence(x, mask_id=3).entropy
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = ["DEFAULT"] if torch.backends.cpu.get_cpu_capability() not in binding.FLAGS else ["DEFAULT", "AVX2"]
    try:
        for capability in others:
            binding.library.cache_clear()
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
            found = native.paged_attention(*case.arguments), native.confidence(x, mask_id=3).entropy
            assert capability in binding.library()[1]
            for ours, other in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, other, rtol=1e-5, atol=2e-6)
        assert len(list((tmp_path / "dlm").glob("native-*.so"))) >= len(others)
    finally:
        binding.library.cache_clear()


def test_one_thread_only_is_not_for_many(monkeypatch):
    monkeypatch.delenv("DLM_NATIVE", raising=False)
    monkeypatch.setattr(binding, "library", lambda: (object(), "cc, DEFAULT, one thread"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert "serve one thread, and torch uses 2" in binding.unavailable()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert binding.unavailable() is None


@pytest.mark.parametrize("struct", structs.STRUCTS)
def test_a_struct_of_another_size_is_an_error(struct, monkeypatch):
    other = type(struct.__name__, (struct,), {"_fields_": [("more", ctypes.c_int64)]})
    monkeypatch.setattr(structs, "STRUCTS", tuple(other if x is struct else x for x in structs.STRUCTS))
    with pytest.raises(RuntimeError, match=f"{struct.__name__} takes .* bytes in C and .* in Python"):
        structs.check_sizes(binding.library()[0])
