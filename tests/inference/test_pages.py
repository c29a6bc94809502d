"""Which pages are handed out, against the rule said in plain sets."""

import numpy as np
import pytest
import torch

from dlm.inference.pages import PagePool, digest
from tests.inference.tiny import tiny_lm

PAGES = 24


def expected(blank: set[int], idle: list[int], count: int, after: int | None) -> tuple[list[int], list[int]]:
    """The pages, and those still idle: neighbours on the right, else the first run of neighbours, else the first."""
    blank, idle = set(blank), list(idle)
    while len(blank) < count:
        blank.add(idle.pop(0))
    if after is not None and all(page in blank for page in range(after + 1, after + 1 + count)):
        return list(range(after + 1, after + 1 + count)), idle
    for first in sorted(blank):
        if all(page in blank for page in range(first, first + count)):
            return list(range(first, first + count)), idle
    return sorted(blank)[:count], idle


@pytest.mark.parametrize("seed", range(20))
def test_pages_are_taken_by_the_rule_whatever_came_before(seed):
    rng = np.random.default_rng(seed)
    pool = PagePool(tiny_lm().network, PAGES, 4, torch.device("cpu"), torch.float32)
    used: list[int] = []
    for number in range(200):
        if used and rng.random() < 0.45:
            page = used.pop(int(rng.integers(len(used))))
            if rng.random() < 0.4:
                pool.register(page, digest([number], b""))
            pool.release([page])
            continue
        count = int(rng.integers(1, 5))
        after = int(rng.choice(used)) if used and rng.random() < 0.7 else None
        idle = list(pool.idle)
        blank = set(range(PAGES)) - set(used) - set(idle)
        if count > len(blank) + len(idle):
            assert pool.allocate(count, after) is None
            continue
        pages, left = expected(blank, idle, count, after)
        assert pool.allocate(count, after) == pages
        assert list(pool.idle) == left
        used += pages
