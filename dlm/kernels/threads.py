"""How many threads the C kernels use: torch's number, or fewer while other processes keep the cores busy.

OpenMP's threads by default spin while they wait for one another. If one of them shares its core with another process,
the others spin until that process pauses: decoding on two threads then takes 20 times as long as on one. Commands make
the wait short (cli/threads.py), which is possible only before torch starts. In any other program these kernels use only
the free cores; their results are the same, bit for bit. OMP_NUM_THREADS, or a number of threads that torch would not
have chosen itself, is obeyed.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

SECONDS = 0.5
"""How long others are watched before the number of threads changes."""
FIXED_BY = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables with which torch's number is kept: the user chose it, or how long threads spin."""
FIXED = any(name in os.environ for name in FIXED_BY)


class Watch:
    """How many of this process's cores others use, as the operating system counts."""

    def __init__(self) -> None:
        self.cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        self.names = {f"cpu{number}" for number in self.cores}
        self.others = 0.0
        self.before = time.monotonic(), self._busy(), time.process_time()

    def update(self) -> None:
        """Measure `others` anew if the last measurement is SECONDS old."""
        then, busy, own = self.before
        now = time.monotonic()
        if now - then >= SECONDS:
            self.before = now, self._busy(), time.process_time()
            self.others = max(0.0, self.before[1] - busy - (self.before[2] - own)) / (now - then)

    def _busy(self) -> float:
        """Seconds that these cores have worked for anyone; 0 where nobody counts them."""
        ticks = 0
        with suppress(OSError):
            for line in Path("/proc/stat").read_text().splitlines():
                name, *counts = line.split()
                if not name.startswith("cpu"):
                    break
                if name in self.names:
                    ticks += sum(map(int, counts[:8])) - int(counts[3]) - int(counts[4])  # idle, and idle for a disk
            return ticks / os.sysconf("SC_CLK_TCK")
        return 0.0


WATCH = Watch()


def threads_now() -> int:
    """How many threads a kernel is to use now: torch's number, or the number of cores that are free, and at least one."""
    given, cores = torch.get_num_threads(), len(WATCH.cores)
    if FIXED or given == 1 or given not in (cores, cores // 2):  # torch takes all cores, or one of a pair
        return given
    WATCH.update()
    return max(1, min(given, cores - round(WATCH.others)))
