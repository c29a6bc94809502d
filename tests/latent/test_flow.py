"""Each formula against a closed form, numpy, or torch.distributions."""

import math

import numpy as np
import pytest
import torch

from dlm.diffusion.rng import Purpose, normal, uniform
from dlm.latent.config import LatentConfig
from dlm.latent.flow import PATHS, embedded, guided, kl
from dlm.latent.sampler import SOLVERS
from dlm.latent.times import BINS, Times
from tests.latent.tiny import noise


def optimum(z, t, s, name):
    """E[v | z_t] where z ~ N(0, s²), from the formulas for jointly normal numbers."""
    a, b = (1 - t, t) if name == "linear" else (math.cos(math.pi * t / 2), math.sin(math.pi * t / 2))
    variance = a * a * s * s + b * b
    clean, rest = a * s * s / variance * z, b / variance * z
    return rest - clean if name == "linear" else a * rest - b * clean


def test_the_linear_optimum_is_that_of_the_table():
    t, s, z = 0.3, 1.7, 0.9
    assert optimum(z, t, s, "linear") == pytest.approx(z * (t - (1 - t) * s**2) / ((1 - t) ** 2 * s**2 + t**2))


def test_vp_is_ld4lgs_in_numpy_and_both_paths_find_their_data_again():
    z, e = noise(50, 4).double(), noise(50, 4, seed=6).double()
    t = torch.rand(50, 1, generator=torch.Generator().manual_seed(0)).double()
    bar = np.cos(np.pi * t.numpy() / 2) ** 2
    root, other = np.sqrt(bar), np.sqrt(1 - bar)
    vp = PATHS["vp"]
    np.testing.assert_allclose(vp.noisy(z, e, t), root * z.numpy() + other * e.numpy(), atol=1e-12)
    np.testing.assert_allclose(vp.velocity(z, e, t), root * e.numpy() - other * z.numpy(), atol=1e-12)
    for path in PATHS.values():
        z_t, v = path.noisy(z, e, t), path.velocity(z, e, t)
        torch.testing.assert_close(path.clean(z_t, v, t), z)
        before, after = path.noisy(z, e, t - 1e-6), path.noisy(z, e, t + 1e-6)
        torch.testing.assert_close((after - before) / 2e-6, path.speed * v, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("t_min", "s"), [(0.1, 0.7), (0.02, 1.0), (0.3, 2.0)])
def test_the_bounds_integral_over_normal_data_is_half_the_log(name, t_min, s):
    """∫ weight E‖v* - v‖² dt = ½ ln(1 + s² SNR(t_min)): mutual information of z and z at t_min."""
    path = PATHS[name]
    u = (torch.arange(200_000).double() + 0.5) / 200_000
    t = t_min ** (1 - u)
    a, b = path.coefficients(t)
    missing = s * s * b * b / (a * a * s * s + b * b)  # E (z - E[z | z_t])²
    error = missing / (b * b)  # ‖v̂ - v‖ is ‖ẑ - z‖ / b on both paths
    found = (path.weight(t) * error * t).mean() * -math.log(t_min)
    low = torch.tensor(t_min, dtype=torch.float64)
    a, b = path.coefficients(low)
    assert found.item() == pytest.approx(0.5 * math.log(1 + s * s * (a / b).item() ** 2), rel=1e-5)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2)])
def test_solvers_reach_normal_data_with_the_error_of_their_order(name, solver, order):
    """Under v* the flow maps N(0, 1) to N(0, s²) by multiplication with s."""
    path, s, z = PATHS[name], 0.5, torch.linspace(-2, 2, 9).double()
    errors = []
    for steps in (32, 64):
        x = z
        for step in range(steps):
            t, lower = 1 - step / steps, 1 - (step + 1) / steps
            x = SOLVERS[solver](lambda y, at: optimum(y, at, s, name), x, t, lower, path, lambda: z)
        errors.append((x - s * z).abs().max().item())
    assert 0 < errors[1] < 0.05
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("name", PATHS)
def test_the_sde_keeps_the_paths_distribution(name):
    path, s, steps, many = PATHS[name], 0.5, 256, 20_000  # fewer steps narrow it: 0.477 after 64
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(many, generator=generator)
    first = z
    for step in range(steps):
        t, lower = 1 - step / steps, 1 - (step + 1) / steps
        z = SOLVERS["sde"](
            lambda y, at: optimum(y, at, s, name), z, t, lower, path, lambda: torch.randn(many, generator=generator)
        )
    assert z.std().item() == pytest.approx(s, abs=0.02) and abs(z.mean().item()) < 0.02
    assert abs(torch.corrcoef(torch.stack((first, z)))[0, 1]) < 0.3  # the noise on the way counts


def test_renoising_is_a_draw_of_the_path():
    for path in PATHS.values():
        t, higher = torch.tensor(0.4), torch.tensor(0.7)
        (a, b), (a_high, b_high) = path.coefficients(t), path.coefficients(higher)
        shift = path.renoised(torch.tensor(1.0), torch.tensor(0.0), t, higher)
        spread = path.renoised(torch.tensor(0.0), torch.tensor(1.0), t, higher)
        torch.testing.assert_close(shift * a, a_high)  # of the data
        torch.testing.assert_close((shift * b) ** 2 + spread**2, b_high**2)  # of the noise


def test_kl_is_that_of_torch_distributions_and_free_bits_are_a_floor():
    mean, log_var, other, log_other = (noise(7, 5, seed=seed) for seed in range(4))
    ours = kl(mean, log_var, other, log_other)
    pair = (torch.distributions.Normal(m, (0.5 * v).exp()) for m, v in ((mean, log_var), (other, log_other)))
    torch.testing.assert_close(ours, torch.distributions.kl_divergence(*pair).sum(-1))
    standard = torch.distributions.Normal(torch.zeros(7, 5), torch.ones(7, 5))
    each = torch.distributions.kl_divergence(torch.distributions.Normal(mean, (0.5 * log_var).exp()), standard)
    torch.testing.assert_close(kl(mean, log_var), each.sum(-1))
    torch.testing.assert_close(kl(mean, log_var, free=0.5), each.clamp(min=0.5).sum(-1))
    torch.testing.assert_close(kl(mean), 0.5 * mean.square().sum(-1))


def test_guidance_counts_as_lladas():
    c, u = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])
    assert torch.equal(guided(c, u, 0.0), c)
    assert guided(c, u, 6.0).tolist() == [0.5 + 7 * 0.5, 4 - 7 * 2]


def test_time_embeddings_are_dits_and_are_not_rounded():
    t = torch.tensor([0.0, 0.2504, 0.2506])
    found = embedded(t, 8).numpy()
    angle = 1000 * t.numpy()[:, None] * 10_000.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(found, np.concatenate((np.cos(angle), np.sin(angle)), -1), atol=2e-4)
    assert not np.allclose(found[1], found[2], atol=0.1)  # 250.4 and 250.6 are not both 250


def test_uniform_and_logit_normal_times_have_their_distributions():
    u = (torch.arange(4096) + 0.5) / 4096
    torch.testing.assert_close(Times(LatentConfig(stage="flow"))(u), u, atol=1.1e-4, rtol=0)
    t = Times(LatentConfig(stage="flow", times="logit_normal", times_mean=-0.5, times_std=0.8))(u)
    x = torch.logit(t)
    assert x.mean().item() == pytest.approx(-0.5, abs=0.01) and x.std().item() == pytest.approx(0.8, abs=0.01)


def test_adaptive_times_are_uniform_under_a_linear_loss_and_dense_where_it_rises():
    u = (torch.arange(4000) + 0.5) / 4000
    times = Times(LatentConfig(stage="flow", times="adaptive"))
    torch.testing.assert_close(times(u), u, atol=2e-3, rtol=0)  # nothing is known yet
    for power, middle in ((1, 0.5), (2, 0.5**0.5)):
        times = Times(LatentConfig(stage="flow", times="adaptive"))
        for _ in range(400):
            times.note(u, 3 + 5 * u**power)
            times.update()
        found = times(u)
        assert found.diff().min() >= 0 and found[0] < 0.05 and found[-1] > 0.95
        assert found[2000].item() == pytest.approx(middle, abs=1 / BINS), power


def test_normal_numbers_are_quantiles_of_addressed_uniform_ones_and_do_not_depend_on_their_neighbours():
    sample = torch.arange(40)[:, None]
    found = normal(Purpose.NOISE, seed=3, sample=sample, step=2, position=torch.arange(9), size=10)
    assert found.shape == (40, 9, 10) and found.mean().abs() < 0.05 and found.std().item() == pytest.approx(1, abs=0.05)
    first = uniform(Purpose.NOISE, seed=3, sample=7, step=2, position=4, token=1)
    expected = torch.distributions.Normal(0.0, 1.0).icdf(first.float())
    torch.testing.assert_close(found[7, 4, 4], expected, atol=1e-5, rtol=1e-5)
    alone = normal(Purpose.NOISE, seed=3, sample=torch.tensor([[7]]), step=2, position=torch.tensor([4]), size=6)
    assert torch.equal(alone[0, 0], found[7, 4, :6])
