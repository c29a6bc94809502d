"""How long OpenMP's threads spin while they wait for one another: set before torch starts, by commands only."""

import os
import sys

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that say how threads wait. Whoever sets one of them keeps what was set."""
BRIEFLY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
"""GNU's OpenMP: 20 to 60 microseconds. LLVM's and Intel's: a millisecond, the least above none."""


def wait_briefly() -> None:
    """Let threads sleep soon after their work is done.

    By default they spin for many milliseconds. That is fast on an idle machine; but where another process has one of
    the cores, every thread spins until all have had their turn. Decoding on two threads then takes 20 times as long.
    Without effect if torch has started already.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in NAMES):
        os.environ.update(BRIEFLY)
