"""The parts of the network: identity at the start, blocks and the whole, what is seen of what, padding."""

import pytest
import torch
import torch.nn.functional as F

from dlm.latent.config import Shape
from dlm.latent.denoiser import Denoiser, Modulated
from dlm.latent.network import LatentNetwork, config_of
from dlm.latent.perceiver import Reader
from dlm.models.attention import AttentionSpec, dense_attend
from tests.latent.tiny import CODING, DENOISING, IDS, ids, network, noise

NEAR = {"atol": 2e-5, "rtol": 1e-4}
CLEAN = torch.zeros(3, 7, dtype=torch.bool)
T = torch.tensor([[0.3], [0.6], [0.9]])


def test_a_new_denoiser_is_the_identity_in_its_layers_and_says_zero():
    found = network()
    found.initialise(torch.Generator().manual_seed(1))
    assert found.denoiser is not None
    assert torch.equal(found.velocity(noise(3, 7, 6), T, CLEAN), torch.zeros(3, 7, 6))
    layer, x = found.denoiser.layers[0], noise(3, 7, 16)
    assert isinstance(layer, Modulated)
    attend = dense_attend(AttentionSpec(), torch.arange(7).expand(3, 7), None)
    assert torch.equal(layer(x, noise(3, 3, 16), CLEAN.long(), attend), x)


def test_a_new_denoisers_learned_positions_are_as_loud_as_the_latents_they_are_added_to():
    told = DENOISING.model_copy(update={"position_embedding": "learned", "hidden_size": 64})
    shape = Shape(stage="flow", tokens_per_latent=1, channels=16, autoencoder=CODING, denoiser=told)
    found = LatentNetwork(shape, config_of(shape, 48, 81, IDS)).eval()
    found.initialise(torch.Generator().manual_seed(0))
    assert found.denoiser is not None and found.denoiser.positions is not None
    entered = found.denoiser.enter(noise(4, 81, 32))
    assert 0.5 < found.denoiser.positions.weight.std() / entered.std() < 2


def test_a_modulated_layer_is_adaln_written_out():
    found = network()
    layer, x, level = found.denoiser.layers[0], noise(2, 5, 16), noise(2, 1, 16)
    attend = dense_attend(AttentionSpec(), torch.arange(5).expand(2, 5), None)

    def norm(y, module):
        return module.weight * y / (y.square().mean(-1, keepdim=True) + module.eps).sqrt()

    a, s, g, a2, s2, g2 = (level @ layer.modulation.weight.T + layer.modulation.bias).split(16, dim=-1)
    y = x + g * layer.attn(norm(x, layer.attn_norm) * (1 + a) + s, attend)
    y = y + g2 * layer.mlp(norm(y, layer.mlp_norm) * (1 + a2) + s2)
    torch.testing.assert_close(layer(x, level, torch.zeros(2, 5, dtype=torch.long), attend), y, **NEAR)


def test_times_of_each_latent_are_its_own():
    """Clean latents are at time 0; a latent's time is what it would be told if all had it."""
    found = network(self_conditioning=False)
    z, clean = noise(1, 7, 6), CLEAN[:1].clone()
    clean[:, :3] = True
    times, which = torch.tensor([[0.4, 0.0]]), clean.long()
    by_hand = found.denoiser(z, times, which, AttentionSpec())
    torch.testing.assert_close(found.velocity(z, torch.tensor([[0.4]]), clean), by_hand, **NEAR)
    assert not torch.allclose(found.velocity(z, torch.tensor([[0.4]]), CLEAN[:1]), by_hand, atol=1e-3)


def test_no_guess_is_a_guess_of_zero_and_a_guess_counts():
    found, z = network(), noise(3, 7, 6)
    off = found.velocity(z, T, CLEAN)
    assert torch.equal(found.velocity(z, T, CLEAN, guess=torch.zeros_like(z)), off)
    assert not torch.allclose(found.velocity(z, T, CLEAN, guess=noise(3, 7, 6, seed=9)), off, atol=1e-3)


def test_a_hidden_prompt_is_not_seen():
    found, clean = network(), CLEAN.clone()
    clean[:, :2] = True
    one, other = noise(3, 7, 6), noise(3, 7, 6)
    other[:, :2] += 1
    assert not torch.allclose(found.velocity(one, T, clean)[:, 2:], found.velocity(other, T, clean)[:, 2:], atol=1e-3)
    shown = (found.velocity(z, T, clean, hidden=clean) for z in (one, other))
    assert torch.equal(*shown)


def test_one_block_is_the_whole_and_later_blocks_change_nothing():
    z, before = noise(3, 7, 6), noise(3, 7, 6, seed=6)
    whole, one = network(), network(block_length=7)
    one.load_state_dict(whole.state_dict())
    torch.testing.assert_close(one.velocity(z, T, CLEAN, before=before), whole.velocity(z, T, CLEAN), **NEAR)
    blocks = network(block_length=3)
    times = torch.tensor([[0.2, 0.5, 0.8]]).expand(3, -1)
    found = blocks.velocity(z, times, CLEAN, before=before)
    for moved in (z, before):
        changed = moved.clone()
        changed[:, 6:] += 1
        pair = (changed, before) if moved is z else (z, changed)
        after = blocks.velocity(pair[0], times, CLEAN, before=pair[1])
        torch.testing.assert_close(after[:, :6], found[:, :6], **NEAR)
        assert torch.equal(after[:, 6:], found[:, 6:]) == (moved is before)  # a block sees itself as it is noised


def test_two_streams_in_training_are_what_the_sampler_sees():
    """A block's velocity beside the clean stream is that behind the clean latents before it."""
    blocks, z, before = network(block_length=3), noise(3, 7, 6), noise(3, 7, 6, seed=6)
    found = blocks.velocity(z, T.expand(-1, 3), CLEAN, before=before)
    for first in (0, 3, 6):
        end = min(first + 3, 7)
        row = torch.cat((before[:, :first], z[:, first:end]), dim=1)
        clean = CLEAN[:, :end].clone()
        clean[:, :first] = True
        torch.testing.assert_close(blocks.velocity(row, T, clean)[:, first:], found[:, first:end], **NEAR)


def test_a_chunk_sees_itself_alone_and_its_latents_have_norm_root_c():
    found, tokens = network(), ids()
    mean, log_var = found.moments(tokens)
    assert mean.shape == (3, 7, 6) and log_var is None
    torch.testing.assert_close(mean.norm(dim=-1), torch.full((3, 7), 6**0.5))
    other = tokens.clone()
    other[:, 7] = (other[:, 7] + 1) % 39  # of the third chunk
    changed = (found.moments(other)[0] != mean).any(-1).any(0)
    assert changed.tolist() == [False, False, True, False, False, False, False]
    torch.testing.assert_close(found.encode(tokens), (mean - found.mean) / found.std)
    tail = found.moments(torch.cat((tokens, torch.ones(3, 1, dtype=torch.long)), dim=1))[0]
    assert torch.equal(tail, mean)  # end-of-text fills the last chunk


def test_the_decoder_never_writes_the_mask_and_undoes_the_normalisation():
    found, z = network(), noise(3, 7, 6)
    logits = found.decode(z, 20)
    assert logits.shape == (3, 20, 48) and logits[..., 40].isneginf().all()
    raw = found.decoder(z * found.std + found.mean, 20) @ found.embed.weight.T
    torch.testing.assert_close(logits[..., :40], raw[..., :40], **NEAR)


def test_the_perceivers_reading_is_attention_written_as_einsum():
    reader = network(kind="perceiver", latents=5).encoder.reader
    assert isinstance(reader, Reader)
    keys, x, attn = noise(2, 9, 16), noise(2, 5, 16, seed=6), reader.attns[0]
    both = torch.cat((keys, x), dim=1)

    def heads(linear, y, norm=None):
        out = linear(y).unflatten(-1, (2, 8))
        return out if norm is None else F.rms_norm(out, (8,), norm.weight, norm.eps)

    q, k, v = heads(attn.q_proj, x, attn.q_norm), heads(attn.k_proj, both, attn.k_norm), heads(attn.v_proj, both)
    weights = (torch.einsum("bqhe,bkhe->bhqk", q, k) / 8**0.5).softmax(-1)
    expected = attn.o_proj(torch.einsum("bhqk,bkhe->bqhe", weights, v).flatten(2))
    from dlm.latent.perceiver import reading

    torch.testing.assert_close(attn(both, reading(5, None)), expected, **NEAR)


def test_padding_changes_nothing_of_a_perceivers_latents():
    found, tokens = network(kind="perceiver", latents=5), ids(2, 12)
    padded = torch.cat((tokens, ids(2, 6)), dim=1)
    valid = torch.arange(18).expand(2, 18) < 12
    torch.testing.assert_close(found.encode(padded, valid), found.encode(tokens), **NEAR)
    assert not torch.allclose(found.encode(padded), found.encode(tokens), atol=1e-3)
    assert found.encode(tokens).shape == (2, 5, 6) and found.decode(noise(2, 5, 6), 12).shape == (2, 12, 48)


def test_a_new_adapter_gives_standard_normal_noise():
    found = network(stage="adapter")
    found.initialise(torch.Generator().manual_seed(0))
    mean, log_std = found.start_from(noise(3, 7, 6), CLEAN)
    assert not mean.any() and not log_std.any() and isinstance(found.adapter, Denoiser)
    shifted = network(stage="adapter")
    clean, z = CLEAN.clone(), noise(3, 7, 6)
    clean[:, :2] = True
    first, moved = shifted.start_from(z, clean)[0], z.clone()
    moved[:, 2:] += 1  # of the answer, which the adapter must not see
    assert torch.equal(shifted.start_from(moved, clean)[0], first) and first.any()


@pytest.mark.parametrize("fields", [{}, {"kind": "perceiver", "latents": 4}, {"variational": True}])
def test_every_matrix_belongs_to_one_optimiser_group(fields):
    found = network(**fields)
    groups = found.matrices()
    assert sum(map(len, groups.values())) == sum(p.ndim == 2 for p in found.parameters())
    assert any(p is found.embed.weight for p in groups["embed"])
    assert isinstance(found, LatentNetwork) and CODING.hidden_size == DENOISING.hidden_size
