"""Drafts drawn from q become tokens of p: counted over all texts, beside a residual that is wrong."""

import numpy as np
import torch

from dlm.diffusion import speculate
from dlm.diffusion.choose import Address
from dlm.diffusion.rng import Purpose
from dlm.diffusion.speculate import Drawn, draw, judge

from .chi2 import p_value

V, LENGTH, DRAWS = 8, 3, 200_000


def table(seed: int, *shape: int, sharp: float = 1.5) -> torch.Tensor:
    return (sharp * torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed))).softmax(-1)


P = [table(1), table(2, V), table(3, V, V)]
"""The target: of each next token, given those before it."""
Q = table(4, LENGTH)
"""The draft: of each place, given nothing."""


def address(step: int, position: int) -> Address:
    n = torch.arange(DRAWS)
    whole = {"seed": torch.full_like(n, 7), "sample": n, "step": torch.full_like(n, step)}
    return Address(**whole, position=torch.full_like(n, position))


def texts(verdict=judge) -> np.ndarray:
    """Each draw drafts all three places at once, and the target walks along them; after a refusal it goes on alone."""
    chosen, alive, history = [], torch.ones(DRAWS, dtype=torch.bool), ()
    for place in range(LENGTH):
        p = P[place][history] if history else P[0].expand(DRAWS, V)
        q = Drawn(Q[place].expand(DRAWS, V))
        here = address(place, place)
        drafted = draw(q.p, Purpose.DRAFT, here)
        judged = verdict(p, q, drafted, here)
        alone = draw(p, Purpose.TOKEN, here)
        token = torch.where(alive, judged, alone)
        alive = alive & (judged == drafted)
        chosen.append(token)
        history = tuple(chosen)
    return np.stack([token.numpy() for token in chosen])


def chance(found: np.ndarray) -> float:
    """p of the χ² test against the target's own probability of each of the 512 texts."""
    counts = np.bincount(np.ravel_multi_index(tuple(found), (V,) * LENGTH), minlength=V**LENGTH)
    expected = (P[0][:, None, None] * P[1][:, :, None] * P[2]).reshape(-1).double().numpy()
    return p_value(counts, expected / expected.sum() * DRAWS)


def test_all_texts_come_as_often_as_the_target_writes_them():
    assert chance(texts()) > 1e-3


def test_a_wrong_residual_is_found_out():
    def wrong(p, q, drafted, here):
        right = judge(p, q, drafted, here)
        return torch.where(right == drafted, drafted, draw(p, Purpose.RESIDUAL, here))

    assert chance(texts(wrong)) < 1e-6


def test_a_wrong_acceptance_is_found_out(monkeypatch):
    real = speculate.uniform

    def shy(purpose, **where):
        return real(purpose, **where) * (1.1 if purpose is Purpose.ACCEPT else 1)

    monkeypatch.setattr(speculate, "uniform", shy)
    assert chance(texts()) < 1e-6


def test_a_refused_draft_is_never_drawn_again():
    p, q = P[0].expand(1000, V), Drawn(Q[0].expand(1000, V))
    here = Address(**{name: x[:1000] for name, x in vars(address(0, 0)).items()})
    drafted = draw(q.p, Purpose.DRAFT, here)
    judged = judge(p, q, drafted, here)
    refused = judged != drafted
    assert 0 < refused.sum() < 1000
    assert (p[0][judged] > q.p[0][judged])[refused].all()  # the residual is positive there


def test_a_certain_draft_is_one_of_all_tokens_with_its_probability():
    tokens = torch.tensor([[2, 5], [1, 0]])
    found = Drawn(torch.tensor([[1.0, 0.0], [0.25, 0.75]]), tokens).dense(V)
    assert found.sum(-1).tolist() == [1, 1]
    assert (found[0, 2], found[1, 0], found[1, 1]) == (1, 0.75, 0.25)


def test_draws_follow_what_need_not_sum_to_one():
    weights = torch.tensor([0.0, 2.0, 0.0, 6.0]).expand(20_000, 4)
    here = Address(**{name: x[:20_000] for name, x in vars(address(0, 0)).items()})
    counts = np.bincount(draw(weights, Purpose.DRAFT, here).numpy(), minlength=4)
    assert counts[0] == counts[2] == 0
    assert abs(counts[3] / 20_000 - 0.75) < 0.02
