"""What the kernels compute, stated in float64 numpy, one row at a time."""

import numpy as np
from torch import Tensor

from tests.kernels.draw import Attention


def attention(case: Attention) -> np.ndarray:
    """Softmax over the keys a row sees, of each head with its group's keys and values."""
    q, k_pages, v_pages = (x.double().numpy() for x in (case.q, case.k_pages, case.v_pages))
    n, h, e = q.shape
    page_size, g = k_pages.shape[1:3]
    scale = e**-0.5 if case.scale is None else case.scale
    out = np.zeros((n, h, e))
    row = 0
    for table, limits in zip(case.spans.tables.tolist(), case.limits(), strict=True):
        for limit in limits:
            where = [(table[j // page_size], j % page_size) for j in range(limit)]
            for head in range(h if limit else 0):
                k = np.stack([k_pages[page, slot, head // (h // g)] for page, slot in where])
                v = np.stack([v_pages[page, slot, head // (h // g)] for page, slot in where])
                scores = k @ q[row, head] * scale
                p = np.exp(scores - scores.max())
                out[row, head] = p @ v / p.sum()
            row += 1
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> np.ndarray:
    """Channel i and its partner i + r/2 turned as one plane, for the first r channels."""
    out, (x64, c, s) = x.double().numpy().copy(), (t.double().numpy() for t in (x, cos, sin))
    half = c.shape[1] // 2
    for i in range(half):
        a, b = x64[:, :, i], x64[:, :, i + half]
        out[:, :, i] = a * c[:, None, i] - b * s[:, None, i]
        out[:, :, i + half] = b * c[:, None, i + half] + a * s[:, None, i + half]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> np.ndarray:
    wide = x.double().numpy()
    return weight.double().numpy() * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)


def confidence(x: Tensor, mask_id: int | None, keep_mask: bool, temperature: float) -> dict[str, np.ndarray]:
    """Probabilities and what follows from them; the token only where it is the argmax."""
    logits = x.double().numpy().copy()
    candidates = logits.copy()
    if mask_id is not None:
        candidates[:, mask_id] = -np.inf
    if not keep_mask:
        logits = candidates
    scaled = (logits - logits.max(-1, keepdims=True)) / (temperature or 1.0)
    p = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
    order = np.argsort(-candidates, axis=-1, kind="stable")  # equals in order of ids
    rows = np.arange(len(p))
    other = np.isfinite(candidates[rows, order[:, 1]])
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)
    second = np.where(other, p[rows, order[:, 1]], 0.0)
    found = {"probabilities": p, "first_token": order[:, 0], "first": p[rows, order[:, 0]], "second": second}
    return {**found, "entropy": -terms.sum(-1)}
