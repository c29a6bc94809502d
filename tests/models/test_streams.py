"""Who sees whom in block diffusion's two streams, against the rule in words, and FlexAttention against the table."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dlm.models.attention import AttentionSpec
from dlm.models.streams import SMALLEST_HEAD, block_mask, dense_mask, flex_attend, visibility
from tests.diffusion.enumeration import tiny_network
from tests.refusals import refused

SHAPES = [(8, 2), (7, 3), (6, 6), (5, 1), (4, 9)]


def looped(length: int, block_length: int) -> torch.Tensor:
    """BD3-LM's mask, a pair of rows at a time."""
    table = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
    for q in range(2 * length):
        for k in range(2 * length):
            q_clean, k_clean = q >= length, k >= length
            q_block, k_block = (q - length * q_clean) // block_length, (k - length * k_clean) // block_length
            same = q_block == k_block and q_clean == k_clean
            context = k_clean and not q_clean and k_block < q_block
            clean = k_clean and q_clean and k_block <= q_block
            table[q, k] = same or context or clean
    return table


@pytest.mark.parametrize(("length", "block_length"), SHAPES)
def test_every_pair_of_rows_is_as_the_paper_says(length, block_length):
    assert torch.equal(dense_mask(length, block_length, torch.device("cpu"))[0], looped(length, block_length))


@pytest.mark.parametrize(("length", "block_length"), SHAPES)
def test_flex_attention_asks_the_same(length, block_length):
    rule = visibility(length, block_length)
    asked = create_block_mask(rule, None, None, 2 * length, 2 * length, "cpu", BLOCK_SIZE=1).to_dense()[0, 0]
    assert torch.equal(asked.bool(), looped(length, block_length))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("head", [8, SMALLEST_HEAD])
def test_flex_attention_computes_what_the_table_does(monkeypatch, head):
    monkeypatch.setattr("dlm.models.streams._compiled", lambda: flex_attention)
    length, block_length, draw = 7, 3, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 2 * length, head, generator=draw) for heads in (4, 2, 2))
    found = flex_attend(q, k, v, block_mask(length, block_length, torch.device("cpu")))
    table = looped(length, block_length)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=table, enable_gqa=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_the_kernel_gives_the_table_s_states_and_gradients():
    network = tiny_network(num_hidden_layers=2, hidden_size=64, head_dim=32)
    spec, length = AttentionSpec("two_stream", 16), 160
    ids = torch.randint(0, 4, (2, 2 * length), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length).repeat(2).expand_as(ids)
    found = []
    for device in ("cpu", "cuda"):
        network.zero_grad()
        network.to(device)
        hidden = network.hidden(ids.to(device), positions.to(device), attention=spec)
        hidden.square().mean().backward()
        found.append([hidden.detach().cpu(), *(p.grad.cpu() for p in network.layers.parameters())])
    for cpu, cuda in zip(*found, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("block_length", [1, 3, 7])
def test_the_state_that_predicts_a_position(shifted, block_length):
    length = 7
    rows = torch.arange(2 * length).view(1, -1, 1)
    states = AttentionSpec("two_stream", block_length).states(rows, shifted).flatten().tolist()
    for position, row in enumerate(states):
        if not shifted or position == 0:
            assert row == position
        elif position % block_length == 0:
            assert row == length + position - 1  # the clean one at the end of the block before
        else:
            assert row == position - 1
    one = AttentionSpec("block_causal", block_length).states(rows[:, :length], shifted).flatten().tolist()
    assert one == ([0, 0, 1, 2, 3, 4, 5] if shifted else list(range(length)))


def test_two_streams_need_a_block_length():
    refused("two_stream attention needs block_length", AttentionSpec, "two_stream", error=ValueError)
