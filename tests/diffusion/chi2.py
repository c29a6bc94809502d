"""The χ² test of counts."""

import numpy as np
import torch


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chance of counts at least as far from `expected`, which has the same sum; what is rarer than 5 is taken together."""
    rare = expected < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    total = float(((counts - expected) ** 2 / expected).sum())
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(total / 2, dtype=torch.float64)))
