"""The loss straight from states: against the formula in numpy, its gradients against numbers, slices, autocast."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dlm.diffusion import head_loss as module
from dlm.diffusion.head_loss import head_loss


def case(n: int = 37, d: int = 12, v: int = 23, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    states = torch.randn(n, d, generator=draw, dtype=dtype).requires_grad_()
    head = torch.randn(v, d, generator=draw, dtype=dtype).requires_grad_()
    targets = torch.randint(1, v, (n,), generator=draw)
    return states, head, targets, torch.rand(n, generator=draw)


@pytest.mark.parametrize("never", [None, 0])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_is_the_formula_whatever_the_slices(monkeypatch, rows, never):
    states, head, targets, weight = case(dtype=torch.float32)
    monkeypatch.setattr(module, "SLICE", rows * len(head))
    found = head_loss(states, head, targets, weight, never)
    z = states.detach().double().numpy() @ head.detach().double().numpy().T
    if never is not None:
        z[:, never] = -np.inf
    top = z.max(1, keepdims=True)
    log_p = z - top - np.log(np.exp(z - top).sum(1, keepdims=True))
    expected = -(weight.numpy() * log_p[np.arange(len(z)), targets.numpy()]).sum()
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_gradients_are_those_of_finite_differences():
    states, head, targets, weight = case(n=5, d=3, v=7, dtype=torch.float64)
    found = torch.autograd.grad(head_loss(states, head, targets, weight, 0) * 3.0, (states, head))
    step = 1e-3
    for tensor, gradient in zip((states, head), found, strict=True):
        for at in range(tensor.numel()):
            values = []
            for sign in (1, -1):
                moved = tensor.detach().clone()
                moved.view(-1)[at] += sign * step
                pair = (moved, head.detach()) if tensor is states else (states.detach(), moved)
                logits = (pair[0] @ pair[1].T).index_fill(1, torch.tensor([0]), float("-inf"))
                values.append((F.cross_entropy(logits, targets, reduction="none") * weight).sum().item())
            slope = 3.0 * (values[0] - values[1]) / (2 * step)
            assert gradient.view(-1)[at].item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("frozen", ["states", "head"])
def test_gives_only_the_gradients_that_are_asked_for(frozen):
    states, head, targets, weight = case(dtype=torch.float32)
    ({"states": states, "head": head}[frozen]).requires_grad_(False)
    head_loss(states, head, targets, weight).backward()
    assert (states.grad is None) == (frozen == "states") and (head.grad is None) == (frozen == "head")


def test_autocast_multiplies_in_its_dtype_and_keeps_the_loss_wide():
    states, head, targets, weight = case(n=200, d=64, v=50, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head_loss(states, head, targets, weight)
    exact = head_loss(states.detach().bfloat16().float(), head.detach().bfloat16().float(), targets, weight)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(exact.item(), rel=1e-3)
    found.backward()
    assert states.grad.dtype == head.grad.dtype == torch.float32
    wide = torch.autograd.grad(head_loss(states, head, targets, weight), (states, head))
    for grad, other in zip((states.grad, head.grad), wide, strict=True):
        assert (grad - other).norm() < 0.02 * other.norm()


def test_no_token_is_no_loss():
    states, head, _, _ = case()
    loss = head_loss(states[:0], head, torch.zeros(0, dtype=torch.long), torch.zeros(0))
    loss.backward()
    assert loss.item() == 0 and head.grad.abs().sum() == 0
