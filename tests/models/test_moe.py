"""The mixture of experts against one token at a time."""

import pytest
import torch
import torch.nn.functional as F

from dlm.models.moe import MoE

from . import tiny


def naive(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """Every token through its experts, one by one; groups by plain sorting."""
    moe, out = layer.router.moe, torch.zeros_like(x)
    for i, token in enumerate(x):
        logits = layer.router.weight @ token
        scores = torch.sigmoid(logits) if moe.score_function == "sigmoid" else torch.softmax(logits, -1)
        wish = scores if layer.router.bias is None else scores + layer.router.bias
        size = moe.num_experts // moe.n_group
        groups = sorted(
            range(moe.n_group), key=lambda g: -wish[g * size : (g + 1) * size].sort().values[-2:].sum().item()
        )
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
    for ours, theirs in zip(
        torch.autograd.grad((fast * weights).sum(), [x, *wanted]),
        torch.autograd.grad((slow * weights).sum(), [x, *wanted]),
        strict=True,
    ):
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
