"""Sets the number of threads of a command, and how they wait for one another, before torch starts.

Only commands do this. `import dlm` leaves the environment of the program that imports it alone.
"""

import math
import os
import sys
from contextlib import suppress
from pathlib import Path

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that say how threads wait. If the user has set one, none is changed."""
BRIEFLY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
"""GNU's OpenMP: 20 to 60 microseconds. LLVM's and Intel's: a millisecond, the least above none."""


def settle_threads() -> None:
    """Make threads sleep soon after their work, and start no more than this process may keep busy.

    By default they spin for many milliseconds. That is fast on an idle machine; but where another process has one of
    the cores, every thread spins until all have had their turn. Decoding on two threads then takes 20 times as long.
    And torch starts a thread for every core, even in a container that is granted the time of a few. OMP_NUM_THREADS is
    obeyed. Without effect if torch has started already.
    """
    if "torch" in sys.modules:
        return
    if not any(name in os.environ for name in NAMES):
        os.environ.update(BRIEFLY)
    granted = cores_granted()
    if "OMP_NUM_THREADS" not in os.environ and granted < (os.cpu_count() or 1):
        os.environ["OMP_NUM_THREADS"] = str(max(1, round(granted)))


def cores_granted(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """How many cores' time the control groups of this process allow; infinite where none is limited."""
    least = math.inf
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "cpu" not in kinds.split(","):
                continue
            base = root / "cpu" if kinds else root  # version 1, version 2
            names = Path(path.lstrip("/")).parts
            least = min(least, *(_quota(base.joinpath(*names[:depth])) for depth in range(len(names) + 1)))
    return least


def _quota(group: Path) -> float:
    with suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return math.inf
