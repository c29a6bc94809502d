"""The network: who sees whom, where predictions come from, gradients; its rotations, its experts, its smallest numbers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dlm
from dlm import UserError
from dlm.models import AttentionSpec
from dlm.models.moe import MoE
from dlm.models.rope import rope_frequencies, rope_table
from dlm.models.subnormals import subnormals_as_zeros
from tests.models import tiny
from tests.refusals import refused


def influence(network: torch.nn.Module, length: int = 10, **kinds: AttentionSpec) -> torch.Tensor:
    """(l, l) bool: does changing token j change the output at i?"""
    ids = tiny.tokens(length, 1)
    with torch.no_grad():
        before = network(ids, **kinds)
        rows = []
        for j in range(length):
            other = ids.clone()
            other[0, j] = 39
            rows.append((network(other, **kinds) != before).any(-1)[0])
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("kind", "block"), [("bidirectional", None), ("causal", None), ("block_causal", 4)])
def test_who_sees_whom(kind, block):
    i, j = torch.arange(10)[:, None], torch.arange(10)[None, :]
    allowed = {"bidirectional": i >= 0, "causal": j <= i, "block_causal": j // (block or 1) <= i // (block or 1)}
    seen = influence(tiny.model("dlm").network, attention=AttentionSpec(kind, block))  # type: ignore[arg-type]
    assert torch.equal(seen, allowed[kind].expand(10, 10))


def test_the_family_decides_who_sees_whom():
    assert influence(tiny.model("Dream").network).all()
    assert torch.equal(influence(tiny.model("qwen3").network), torch.ones(10, 10, dtype=torch.bool).tril())
    assert not influence(tiny.model("sdar").network)[3, 4]


@pytest.mark.parametrize("case", ["dlm", "Dream", "Fast_dLLM_Qwen", "llada2_moe"])
def test_predict_is_aligned_with_the_token_it_predicts(case):
    lm, ids = tiny.model(case), tiny.tokens()
    rows = ids == lm.require_mask_id()
    with torch.no_grad():
        raw, got = lm.network(ids), lm.predict(ids, rows)
    if lm.config.shifted_logits:
        raw = torch.cat((raw[:, :1], raw[:, :-1]), 1)
    expected = raw[rows]
    if case == "dlm":
        assert (got[:, 40] == float("-inf")).all()
        expected[:, 40] = float("-inf")
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("case", ["dlm", "sdar", "qwen3", "dlm-learned"])
def test_padding_changes_nothing(case):
    lm, ids = tiny.model(case), tiny.tokens(9, 1)
    padded = torch.cat((ids, torch.full((1, 4), 7)), 1)
    valid = torch.arange(13)[None] < 9
    left = torch.cat((torch.full((1, 4), 7), ids), 1)
    with torch.no_grad():
        alone = lm.network(ids)
        right_padded = lm.network(padded, valid=valid)[:, :9]
        positions = torch.cat((torch.zeros(4, dtype=torch.long), torch.arange(9)))[None]
        left_padded = lm.network(left, positions=positions, valid=valid.flip(1))[:, 4:]
    torch.testing.assert_close(right_padded, alone)
    if case != "qwen3":  # causal sight goes by position, and the padding above sits at position 0
        torch.testing.assert_close(left_padded, alone)


def test_gradient_checkpointing_changes_nothing():
    network, ids = tiny.model("dlm-moe").network.train(), tiny.tokens()
    grads = []
    for network.gradient_checkpointing in (False, True):
        network.zero_grad()
        network(ids).square().mean().backward()
        grads.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    for plain, again in zip(*grads, strict=True):
        tiny.near(plain, again)


def test_initial_weights():
    network = tiny.model("dlm-moe").network
    network.initialise(torch.Generator().manual_seed(0))
    weights = dict(network.named_parameters())
    assert abs(weights["embed.weight"].std() - 0.3) < 0.02
    for name in ("layers.0.mlp.down_proj.weight", "layers.1.mlp.experts.down", "layers.1.attn.o_proj.weight"):
        assert abs(weights[name].std() - 0.3 / 4**0.5) < 0.03  # two layers: 1/sqrt(2 · 2)
    assert (weights["norm.weight"] == 1).all()
    assert (weights["layers.0.attn.o_proj.bias"] == 0).all()


@pytest.mark.parametrize("case", ["dlm", "dlm-moe"])
def test_rows_that_nobody_asks_for_are_left_out_of_the_last_layer_alone(case):
    def attend(layer: int, *rows: torch.Tensor) -> torch.Tensor:
        shown.append(len(rows[0]))
        q, k, v = (part.transpose(0, 1)[None] for part in rows)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)

    network, shown, after = tiny.model(case).network.eval(), [], []
    ids, positions, output_rows = torch.arange(1, 10), torch.arange(9), torch.tensor([2, 3, 7])
    for layer in network.layers:
        layer.mlp.register_forward_hook(lambda _, rows, __: after.append(len(rows[0])))
    with torch.no_grad():
        whole = network.hidden(ids, positions, attend=attend)
        some = network.hidden(ids, positions, attend=attend, output_rows=output_rows)
    torch.testing.assert_close(some, whole[output_rows])
    assert shown == [9] * 4 and after == [9, 9, 9, 3]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3,
    YARN,
    YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    YARN | {"truncate": False},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_scalings(scaling):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny.config("llama", head_dim=32, max_position_embeddings=256, rope_scaling=scaling, rope_theta=5e4)
    shape = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 256}
    theirs = LlamaConfig(**shape, rope_parameters={**scaling, "rope_theta": 5e4})
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    ours, gain = rope_frequencies(config)
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=0)
    assert gain == pytest.approx(factor)


def test_tables_are_computed_in_fp32_whatever_the_default():
    freq, gain = rope_frequencies(tiny.config("dlm", head_dim=8, rope_theta=100.0))
    cos, sin = rope_table(freq, gain, torch.tensor([[0, 3]]), torch.float32)
    angles = 3 * torch.tensor([1.0, 100**-0.25, 100**-0.5, 100**-0.75] * 2)
    torch.testing.assert_close(cos[0, 1, 0], angles.cos())
    torch.testing.assert_close(sin[0, 1, 0], angles.sin())
    with torch.device("meta"):
        assert rope_frequencies(tiny.config("dlm", rope_scaling=YARN))[0].device.type == "cpu"


def test_scalings_that_cannot_be_used_are_named():
    with pytest.raises(UserError, match="'dynamic' is not supported; known: default, linear, llama3, yarn"):
        rope_frequencies(tiny.config("dlm", rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    refused("lacks 'factor'", rope_frequencies, tiny.config("dlm", rope_scaling={"rope_type": "linear"}))


def naive(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """Every token through its experts, one by one; groups by plain sorting."""
    moe, out = layer.router.moe, torch.zeros_like(x)
    for i, token in enumerate(x):
        logits = layer.router.weight @ token
        scores = torch.sigmoid(logits) if moe.score_function == "sigmoid" else torch.softmax(logits, -1)
        wish = scores if layer.router.bias is None else scores + layer.router.bias
        size = moe.num_experts // moe.n_group
        worth = [wish[g * size : (g + 1) * size].sort().values[-2:].sum().item() for g in range(moe.n_group)]
        groups = sorted(range(moe.n_group), key=lambda g: -worth[g])
        able = [e for e in range(moe.num_experts) if e // size in groups[: moe.topk_group]]
        chosen = sorted(able, key=lambda e: -wish[e].item())[: moe.num_experts_per_tok]
        total = sum(scores[e] for e in chosen) if moe.norm_topk_prob else 1.0
        for e in chosen:
            gate, up = (layer.experts.gate_up[e] @ token).chunk(2)
            part = layer.experts.down[e] @ (F.silu(gate) * up)
            out[i] += moe.routed_scaling_factor * scores[e] / total * part
        if layer.shared is not None:
            s = layer.shared
            out[i] += s.down_proj.weight @ (F.silu(s.gate_proj.weight @ token) * (s.up_proj.weight @ token))
    return out


@pytest.mark.parametrize("case", ["llada2_moe", "llada_moe", "dlm-moe"])
def test_outputs_and_gradients(case):
    layer = tiny.model(case).network.layers[1].mlp
    assert isinstance(layer, MoE)
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
    fast, slow = layer(x), naive(layer, x.flatten(0, 1)).view_as(x)
    assert (fast - slow).abs().max() < 1e-6 * slow.abs().max()
    wanted = [p for p in layer.parameters() if p.requires_grad]
    weights = torch.randn(fast.shape, generator=torch.Generator().manual_seed(3))
    gradients = [torch.autograd.grad((out * weights).sum(), [x, *wanted]) for out in (fast, slow)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


def test_a_token_does_not_depend_on_its_neighbours():
    layer = tiny.model("llada2_moe").network.layers[1].mlp
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        together = layer(x)
        for i in range(7):
            torch.testing.assert_close(layer(x[i : i + 1])[0], together[i], rtol=1e-5, atol=1e-5)
        assert layer(x[:0]).shape == (0, 16)


@pytest.mark.gpu
def test_grouped_kernel():
    layer = tiny.model("llada2_moe", hidden_size=64, moe={**tiny.MOE, "intermediate_size": 32}).network.layers[1].mlp
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        slow = layer(x)
        fast = layer.cuda().bfloat16()(x.cuda().bfloat16()).float().cpu()
    assert (fast - slow).norm() < 0.05 * slow.norm()


def product() -> float:
    return (torch.tensor(1e-30) * 1e-10).item()


def test_zeros_until_left_also_by_an_error():
    with subnormals_as_zeros():
        with subnormals_as_zeros():
            assert product() == 0
        assert product() == 0
    assert product() > 0
    with pytest.raises(ValueError, match="lost"), subnormals_as_zeros():
        raise ValueError("lost")
    assert product() > 0


def test_decoding_computes_with_zeros_and_leaves_the_callers_arithmetic_alone():
    lm, products = tiny.model("dlm"), []
    hook = lm.network.layers[0].mlp.register_forward_hook(lambda *_: products.append(product()))
    try:
        dlm.generate(lm, [[1, 2, 3]], gen_length=4, block_length=4, steps=4)
    finally:
        hook.remove()
    assert products and not any(products), "they make a CPU several times slower"
    assert product() > 0 and np.float32(1e-30) * np.float32(1e-10) > 0
