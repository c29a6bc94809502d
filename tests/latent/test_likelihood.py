"""The bound: of data whose likelihood is known, by its parts, and against what must not change it."""

import math

import pytest
import torch

from dlm.latent.likelihood import best_start, bound
from tests.latent.tiny import ids, network


class Known(torch.nn.Module):
    """In place of a denoiser: the best velocity for latents that are one of some points, all equally likely."""

    def __init__(self, points: torch.Tensor) -> None:
        super().__init__()
        self.points = points

    def forward(self, z, times, which, attention):
        t = times[:, :1, None]
        near = (z.unsqueeze(-2) - (1 - t)[..., None] * self.points).square().sum(-1)
        share = torch.softmax(-near / (2 * t**2), dim=-1)
        return (z - share @ self.points) / t


class Off(Known):
    """The same, and then not quite."""

    def __init__(self, points: torch.Tensor, scale: float, shift: float) -> None:
        super().__init__(points)
        self.scale, self.shift = scale, shift

    def forward(self, *given):
        return self.scale * super().forward(*given) + self.shift


TEXTS = torch.tensor([[2], [3], [4], [5]])


def known() -> object:
    """A network over four one-token texts whose flow is perfect, and whose decoder takes the nearest text."""
    found = network(tokens_per_latent=1, self_conditioning=False)
    points = found.encode(TEXTS)[:, 0]
    found.denoiser = Known(points)

    def decode(z, length):
        near = (z[:, :1] - points).square().sum(-1).argmin(-1)
        return 1000 * torch.nn.functional.one_hot(near[:, None] + 2, 48).float()

    found.decode = decode
    return found


def test_the_bound_of_known_texts_is_their_entropy_where_the_decoder_knows_them():
    found = known()
    draws = bound(found, TEXTS.repeat(128, 1), draws=64, t_min=0.02).mean(-1)
    error = draws.std().item() / len(draws) ** 0.5
    assert draws.mean().item() == pytest.approx(math.log(4), abs=4 * error) and error < 0.04


def test_the_bound_is_a_bound_whatever_the_network_says():
    """Texts of four, all equally likely, cost log 4: nothing that a denoiser says brings the bound below."""
    found = known()
    points = found.denoiser.points
    for scale, shift in ((0.9, 0.0), (1.0, 0.2), (1.1, 0.0)):
        found.denoiser = Off(points, scale, shift)
        assert bound(found, TEXTS.repeat(64, 1), draws=64, t_min=0.02).mean() > 1.1 * math.log(4)


def test_rows_do_not_depend_on_each_other_and_draws_are_told_apart():
    for fields in ({}, {"block_length": 3}, {"kind": "perceiver", "latents": 4}):
        found, tokens = network(**fields), ids()
        together = bound(found, tokens, index=torch.tensor([4, 5, 6]), draws=3, seed=2)
        alone = bound(found, tokens[1:2], index=torch.tensor([5]), draws=3, seed=2)
        torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-3)
        assert together.shape == (3, 3) and together.unique().numel() == 9
        assert not torch.equal(together, bound(found, tokens, index=torch.tensor([4, 5, 6]), draws=3, seed=3))


def test_what_is_given_costs_nothing():
    found, tokens = network(), ids()
    answer = torch.zeros_like(tokens, dtype=torch.bool)
    assert not bound(found, tokens, answer=answer, draws=2).any()
    answer[:, 9:] = True
    part, whole = (bound(found, tokens, answer=a, draws=8).mean() for a in (answer, None))
    assert 0 < part < whole


def test_blocks_in_one_piece_cost_what_the_whole_does():
    whole, one, tokens = network(), network(block_length=7), ids()
    one.load_state_dict(whole.state_dict())
    torch.testing.assert_close(bound(one, tokens, draws=4), bound(whole, tokens, draws=4), rtol=1e-4, atol=1e-3)


def test_the_best_start_is_the_cheapest_level():
    found, tokens = network(), ids()
    levels = (0.05, 0.2)
    costs = [bound(found, tokens, draws=4, t_min=level).mean().item() for level in levels]
    assert best_start(found, tokens, levels) == levels[costs.index(min(costs))]
