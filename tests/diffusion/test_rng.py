"""Addressed random numbers against published vectors and the distributions they must follow."""

import math

import pytest
import torch

from dlm.diffusion.rng import Purpose, gumbel, philox, uniform

# Random123's known-answer file, philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_known_answers(counter, key, output):
    assert tuple(int(word) for word in philox(key, counter)) == output


def test_philox_broadcasts_and_does_not_depend_on_its_neighbours():
    together = philox((torch.arange(5)[:, None], 7), (1, 2, torch.arange(3), 0))
    assert all(word.shape == (5, 3) for word in together)
    alone = philox((4, 7), (1, 2, 2, 0))
    assert [int(word[4, 2]) for word in together] == [int(word) for word in alone]


def test_uniform_is_uniform():
    numbers = uniform(Purpose.ORDER, seed=0, position=torch.arange(200_000))
    assert numbers.dtype == torch.float64
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 50, 0, 1)
    chi2 = ((counts - 4000) ** 2 / 4000).sum()
    assert chi2 < 49 + 5 * math.sqrt(2 * 49)


@pytest.mark.parametrize("coordinate", ["seed", "sample", "step", "position", "token"])
def test_every_coordinate_of_an_address_matters(coordinate):
    base = {"seed": 3, "sample": 0, "step": 1, "position": 2, "token": 0}
    numbers = [uniform(Purpose.TOKEN, **{**base, coordinate: value}) for value in range(20)]
    assert len({float(number) for number in numbers}) == 20


def test_purposes_never_share_a_number():
    assert len({float(uniform(purpose, seed=1, step=2)) for purpose in Purpose}) == len(Purpose)


def rows(n: int, **fixed: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((n,), fixed.get(name, 0)) for name in ("seed", "sample", "step", "position")}


def test_gumbel_has_its_moments_and_an_upper_tail():
    address = rows(500) | {"position": torch.arange(500)}
    noise = gumbel(**address, vocab_size=997)
    assert noise.shape == (500, 997)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772157) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    n = noise.numel()
    for x in (4.0, 6.0, 8.0):  # P(G > x) = 1 - exp(-exp(-x))
        expected = n * -math.expm1(-math.exp(-x))
        assert abs((noise > x).sum() - expected) < 5 * math.sqrt(expected)


def test_gumbel_of_a_row_is_its_own():
    address = rows(6, seed=5) | {"position": torch.arange(6)}
    together = gumbel(**address, vocab_size=33)
    for i in range(6):
        alone = gumbel(**{name: value[i : i + 1] for name, value in address.items()}, vocab_size=33)
        assert torch.equal(together[i], alone[0])
    assert torch.equal(gumbel(**address, vocab_size=40)[:, :33], together)
