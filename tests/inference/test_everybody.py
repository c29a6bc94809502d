"""A little of `tests.inference.stress` and `tests.inference.interrupts`."""

import pytest

from . import interrupts
from .stress import Stress


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_everybody_calls_one_engine(family):
    stress = Stress(family, deeds=80, seed=1)
    counted = stress.run()
    assert stress.failures == [] and counted["texts"] > 20


def test_an_interrupt_at_any_line_leaves_an_engine_that_goes_on():
    counted = interrupts.run(40, seed=2)
    assert counted["interrupted"] > 20
    assert not any(counted[kind] for kind in ("wrong", "stuck", "lost", "leak"))
