"""The network itself: who sees whom, where predictions come from, padding, gradients."""

import pytest
import torch

from dlm.models import AttentionSpec

from . import tiny


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
