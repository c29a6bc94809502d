"""How long a call takes, and how fast this machine copies. Knows nothing of what is called."""

import time
from collections.abc import Callable
from statistics import median

import torch


def time_of(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds a call, the median over rounds that last `seconds` together at least; on a GPU the host does not wait between calls."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()  # compiles, and fills caches
    wait()
    started = time.perf_counter()
    call()
    wait()
    once = max(time.perf_counter() - started, 1e-7)
    calls = max(1, round(seconds / 5 / once))
    rounds = []
    for _ in range(5 if calls > 1 else 3):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        rounds.append((time.perf_counter() - started) / calls)
    return median(rounds)


def copy_bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes a second that a large copy moves, read and written: what a memory-bound kernel is held to."""
    size = 2**28 if device.type == "cuda" else 2**25
    source, target = (
        torch.ones(size, dtype=torch.uint8, device=device),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    return 2 * size / time_of(lambda: target.copy_(source), device, seconds)
